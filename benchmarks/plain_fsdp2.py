"""The peer: the code that a PyTorch user writes by hand to shard a model with FSDP2. It uses nothing of phalanx but the
model's module, so that both sides compute the same thing."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_


class PlainFSDP2:
    def __init__(self, model, mesh, lr, betas, eps, weight_decay, clip):
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model, self.clip = model, clip
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)

    def step(self, batches, lr):
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        tokens = torch.tensor(sum(int(b.weights_BL.sum()) for b in batches))
        dist.all_reduce(tokens)
        total = torch.zeros(())
        for i, batch in enumerate(batches):
            self.model.set_is_last_backward(i == len(batches) - 1)
            logits = self.model(batch)
            per_token = F.cross_entropy(logits.flatten(0, 1), batch.targets_BL.flatten(), reduction="none")
            loss = (per_token * batch.weights_BL.flatten()).sum()
            # FSDP2 averages over ranks, but this loss is a share of a sum.
            (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        norm = clip_grad_norm_(self.model.parameters(), self.clip).full_tensor()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm
