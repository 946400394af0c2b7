"""Cases of the tests of single axes, run inside pool workers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from phalanx.core.job import Job
from phalanx.model import Attend, Batch
from phalanx.parallel.context import apply_context_parallel, cut_batch, local_positions
from phalanx.parallel.device import Device
from phalanx.parallel.expert import Exchange
from phalanx.parallel.groups import Groups
from phalanx.parallel.rendezvous import MeetingStore
from tests.cases import CPU, connect


def _groups(args, experts=False, device=CPU):
    job = Job.from_dict(args["job"])
    coord = job.layout.coord(args["rank"])
    store = MeetingStore(args["store"], ("case", args["generation"]))
    return job, coord, Groups.form(store, args["generation"], job.layout, coord, device, experts)


def attention(args):
    """Attend to documents of the given lengths over cp ranks. Return this rank's part of the output and of the input's
    gradients, beside those of the whole sequence on one process. A second row has them in the opposite order."""
    device = Device.pick(args.get("device", "cpu"), 0, 64, share=True)
    dtype = getattr(torch, args.get("dtype", "float64"))
    job, coord, groups = _groups(args, device=device)
    length = sum(args["documents"])
    lengths = torch.tensor([args["documents"], args["documents"][::-1]])
    documents = torch.stack([torch.arange(lengths.shape[1]).repeat_interleave(row) for row in lengths])
    generator = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(2, 4, length, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 2, length, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    rows = torch.zeros(2, length)
    whole = Batch(rows, rows, rows, documents)

    def run(attend, batch, parts, grad):
        parts = [p.clone().requires_grad_() for p in parts]
        out = attend(*parts, batch)
        return [out.detach(), *torch.autograd.grad(out, parts, grad)]

    want = run(Attend(args["causal"]), whole, (q, k, v), grad)
    here = local_positions(job.layout, length, coord.cp)
    holder = nn.ModuleList([Attend(args["causal"]), nn.Linear(1, 1)])
    apply_context_parallel(holder, job.layout, groups.axis("cp"))
    batch = cut_batch(whole, job.layout, length, coord.cp).map(device.put)
    holder[0].packed = not device.is_cpu and dtype == torch.bfloat16
    holder[0].prepare(batch, documents, device.put)
    local = [t[:, :, here].to(device.torch, dtype) for t in (q, k, v, grad)]
    got = [t.cpu().double() for t in run(holder[0], batch, local[:3], local[3])]
    errors = [float((a - b[:, :, here]).abs().max()) for a, b in zip(got, want, strict=True)]
    unmasked = run(Attend(args["causal"]), Batch(rows, rows, rows), (q, k, v), grad)
    groups.close()
    return {
        "error": max(errors),
        "mask matters": float((unmasked[0] - want[0])[:, :, here].abs().max()),
        "documents here": sorted(set(documents[0, here].tolist())),
    }


def exchange(args):
    """Send rows that carry their own address out and back; return what the experts' rank saw of them."""
    _, _, groups = _groups(args, experts=True)
    group = groups.experts.get_group("ep")
    experts, rank, width = args["experts"], group.rank(), group.size()
    counts = torch.tensor([(rank + 1) * e % 4 if args["some"] else 0 for e in range(experts)])
    rows = torch.tensor([[rank, e, i] for e in range(experts) for i in range(int(counts[e]))], dtype=torch.float64)
    rows = rows.view(-1, 3).requires_grad_()
    trip = Exchange(group, experts)
    got, here, back = trip(rows, counts)
    assert got.shape[0] == int(here.sum())
    held = torch.repeat_interleave(torch.arange(*trip.held), here)
    assert got[:, 1].long().equal(held), "rows are not sorted by expert"
    returned = back(got * 2)
    assert torch.equal(returned, rows * 2)
    returned.sum().backward()
    assert rows.grad.eq(2).all()
    sent, seen = torch.tensor([counts.sum()]), torch.tensor([here.sum()])
    dist.all_reduce(sent), dist.all_reduce(seen)
    groups.close()
    return [int(sent), int(seen), width]


def torch_split_backward(args):
    """Run torch's own split of a backward over an FSDP2 module that frees its parameters after forward. Return how many
    weights have a gradient in the end."""
    _, _, groups = _groups(args)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    for block in model:
        fully_shard(block, mesh=groups.state, reshard_after_forward=args["reshard"])
    fully_shard(model, mesh=groups.state, reshard_after_forward=args["reshard"])
    model.set_requires_gradient_sync(False)
    x = torch.randn(2, 8, requires_grad=True)
    out = model(x)
    loss = out.sum()
    weights = list(model.parameters())
    _, param_groups = stage_backward_input([loss], None, [x], iter(weights))
    if param_groups:
        stage_backward_weight(iter(weights), param_groups)
    state = fully_shard.state(model)
    found = 0
    for inner in state._state_ctx.all_states:
        for group in inner._fsdp_param_groups:
            found += sum(p._unsharded_param.grad is not None for p in group.fsdp_params)
    groups.close()
    return found


def compiled_graphs(args):
    """Count the graphs that torch compiles in a step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    rank = connect(args)
    rank.engine.step(rank.batches(0))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    rank.close()
    return graphs


def results_of_functions(args):
    """For each result of an autograd function in a compiled block, name the operations that returned this very tensor.
    The job's compiler is the one registered here, which only looks."""
    found = []

    def look(module, _):
        for body in (m for name, m in module.named_modules() if name.startswith("fwd_body")):
            *nodes, output = body.graph.nodes
            results = output.args[0][0]
            for result in results if isinstance(results, tuple) else (results,):
                value = result.meta["example_value"]
                found.append([node.name for node in nodes if node.meta.get("example_value") is value])
        return module.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(look, name="look")
    rank = connect(args)
    rank.engine.step(rank.batches(0))
    rank.close()
    return found
