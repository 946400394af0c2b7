"""The catalogue of chips, nodes, fabrics and sites, each figure with its source, and the clusters made of them. It is
packaged as TOML, and users lay their own entries over it. It uses neither torch nor pydantic."""

from phalanx.hardware.catalogue import Catalogue, cluster, load
from phalanx.hardware.nouns import Chip, Cluster, Fabric, Node, Price, ScaleUp, Site, Tier

__all__ = ["Catalogue", "Chip", "Cluster", "Fabric", "Node", "Price", "ScaleUp", "Site", "Tier", "cluster", "load"]
