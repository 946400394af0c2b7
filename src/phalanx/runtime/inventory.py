"""Facts that a node finds out about itself before it joins: its address towards the controller, its hardware, and the
code it runs. Nothing here talks to another process."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib
import importlib.metadata
import ipaddress
import json
import os
import platform
import resource
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from phalanx.core.errors import MOST_INT, UserError
from phalanx.core.limits import limit_bytes, num_cores
from phalanx.runtime.wire import Message, Schemas, WireError, check

MOST_ABOUT_BYTES = 64 << 10  # even a host with a thousand interfaces and devices needs less
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
NUMA = Path("/sys/devices/system/node")


def version() -> str:
    """Return the release and a hash of the code. Nodes that differ in either do not train together."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    release = sys.modules["phalanx"].__version__  # importing it here would import its users, in the eyes of the linter
    return f"{release}+{digest.hexdigest()[:12]}"


def parse_address(text: str, field: str) -> tuple[str, int]:
    """Parse HOST:PORT, and resolve the host's name."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError("expected HOST:PORT", field=field, value=text, remedy="the controller prints its address")
    return resolve(host, field), int(port)


def resolve(host: str, field: str) -> str:
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, socket.AF_INET)[0][4][0])
    except OSError as error:
        remedy = "name it by its address, or add it to DNS or /etc/hosts of this host"
        raise UserError(
            f"this name has no address here: {error.strerror}", field=field, value=host, remedy=remedy
        ) from None


def address_towards(*hosts: str) -> str:
    """Return the address from which this host reaches the first of `hosts` that it has a route to."""
    for host in hosts[:-1]:
        with contextlib.suppress(UserError):
            return _address_towards(host)
    return _address_towards(hosts[-1])


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((host, 9))  # nothing is sent
        except OSError as error:
            remedy = "is the interface up, and is there a route? `ip route get` says which one is taken"
            raise UserError(f"{host} cannot be reached from here: {error.strerror}", remedy=remedy) from None
        return str(sock.getsockname()[0])


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                packed = fcntl.ioctl(sock, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(packed[20:24])
    return found


def interface_of(address: str) -> str:
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    return next((name for name, has in interfaces().items() if has == address), "")


def network_near(text: str) -> str:
    """Return the network of an address that was written with a prefix, or "" if it is not one."""
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        return ""


def inside(network: str) -> dict[str, str]:
    """Return the interfaces of this host that are in a network."""
    try:
        known = ipaddress.ip_network(network)
    except ValueError as error:
        remedy = f'write it as "{network_near(network) or "10.1.0.0/16"}"'
        raise UserError(f"it is no network: {error}", field="run.networks", value=network, remedy=remedy) from None
    return {name: address for name, address in interfaces().items() if ipaddress.ip_address(address) in known}


def rails(networks: list[str], address: str) -> list[dict[str, str]]:
    """Return the interfaces over which ranks may speak with each other, the preferred one first: this host's interface
    in each of the networks or, if there are none, the one that reaches the controller."""
    if not networks:
        return [{"interface": interface_of(address), "address": address}]
    out = []
    for network in networks:
        found = inside(network)
        if not found:
            have = ", ".join(f"{name} {has}" for name, has in interfaces().items())
            raise UserError(
                f"no interface of this host is in it; it has {have}",
                field="run.networks",
                value=network,
                remedy="correct run.networks, or give this host an address there",
            )
        interface = next(iter(found))
        out.append({"interface": interface, "address": found[interface]})
    return out


def about(address: str, topology: str = "") -> dict[str, Any]:
    """Describe this host to the controller and for the run's record. If the starter gives no `topology`, it comes from
    Slurm, without the last name, which is the host's."""
    devices, domain = _devices()
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "address": address,
        "interfaces": interfaces(),
        "devices": devices,
        "domain": domain,  # of NVLink; empty if the host is a domain of its own
        "topology": topology or os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0],
        "cores": num_cores(),
        "memory_bytes": limit_bytes(),
        "numa_nodes": len(list(NUMA.glob("node[0-9]*"))) or 1,
        "memlock_bytes": -1 if soft == resource.RLIM_INFINITY else soft,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "pid": os.getpid(),
    }


#: The fields of `about`, and the time. Others are refused, because all of it goes to the run's record unchanged.
ABOUT: Schemas = {
    "about": {
        "address": str,
        "interfaces": dict,
        "devices": list,
        "domain": str,
        "topology": str,
        "cores": int,
        "memory_bytes": int,
        "numa_nodes": int,
        "memlock_bytes": int,
        "system": str,
        "python": str,
        "torch": str,
        "pid": int,
        "clock_s": (int, float),
    }
}


def check_about(said: Message) -> None:
    """Raise WireError if this is not a valid description of a node."""
    check({**said, "type": "about"}, ABOUT)
    if more := said.keys() - ABOUT["about"].keys():
        raise WireError(f"about.{min(more)} is not known")
    if (size := len(json.dumps(said))) > MOST_ABOUT_BYTES:
        raise WireError(f"about has {size} bytes: expected at most {MOST_ABOUT_BYTES}")
    for name, value in said.items():
        if isinstance(value, (int, float)) and not -MOST_INT < value < MOST_INT:  # refuses NaN too
            raise WireError(f"about.{name} = {str(value)[:30]}: expected at most {MOST_INT}")


def _version_of(package: str) -> str:
    """Return the version of a package without importing it, or "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _devices() -> tuple[list[str], str]:
    """Return the names of the accelerators, and the NVLink domain that they are in."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        names = [nvml.nvmlDeviceGetName(handle) for handle in handles]
    except Exception:  # no package, no driver, no device
        return sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*")), ""
    domain = ""
    with contextlib.suppress(Exception):  # older drivers, and hosts outside any domain
        info = (getattr(nvml, "c_nvmlGpuFabricInfo_v3_t", None) or nvml.c_nvmlGpuFabricInfoV_t)()
        nvml.nvmlDeviceGetGpuFabricInfoV(handles[0], ctypes.byref(info))  # the package passes on what it is given
        cluster = bytes(info.clusterUuid)
        domain = f"{cluster.hex()}/{info.cliqueId}" if any(cluster) else ""
    return [name if isinstance(name, str) else name.decode() for name in names], domain
