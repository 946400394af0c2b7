"""An independent plain PyTorch decoder (dense or with experts), image classifier, loss, clipping and AdamW,
written from the formulas and importing nothing of phalanx. What it computes on one process is what every
layout must reproduce."""

import math

import torch


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x, theta):  # x: (batch, heads, length, head_dim)
    length, head_dim = x.shape[-2:]
    half = head_dim // 2
    out = torch.empty_like(x)
    position = torch.arange(length, dtype=torch.float64)
    for e in range(half):
        angle = position * theta ** (-2.0 * e / head_dim)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        out[..., e] = x[..., e] * cos - x[..., e + half] * sin
        out[..., e + half] = x[..., e + half] * cos + x[..., e] * sin
    return out


class Router:
    """What the experts' layers keep beside the weights: the selection bias of each; the load since `begin`;
    and the balance loss of every sequence times its length, summed."""

    def __init__(self, cfg):
        self.cfg, self.bias = cfg, {}
        self.begin()

    def begin(self):
        self.load, self.balance = {}, 0.0

    def choose(self, layer, scores):
        """0 or 1 for every sequence, token and expert."""
        experts, top_k = self.cfg["num_experts"], self.cfg["top_k"]
        left = scores.detach() + self.bias.get(layer, torch.zeros(experts, dtype=scores.dtype))
        chosen = torch.zeros_like(left)
        for _ in range(top_k):
            best = left.argmax(-1, keepdim=True)
            chosen.scatter_(-1, best, 1.0)
            left.scatter_(-1, best, -math.inf)
        self.load[layer] = self.load.get(layer, 0) + chosen.sum((0, 1))
        for s, c in zip(scores, chosen, strict=True):  # each sequence by itself
            length = len(s)
            share, score = c.sum(0) / (length * top_k), (s / s.sum(-1, keepdim=True)).mean(0)
            self.balance = self.balance + length * self.cfg["balance_loss"] * experts * (share * score).sum()
        return chosen

    def end(self):
        """The step is done: biases follow the loads."""
        for layer, load in self.load.items():
            step = self.cfg["balance_bias"] * torch.sign(load.mean() - load)
            self.bias[layer] = self.bias.get(layer, torch.zeros_like(load)) + step


def swiglu(x, w1, w2, w3):
    gate = x @ w1.T
    return (gate * torch.sigmoid(gate) * (x @ w3.T)) @ w2.T


def mixture(w, cfg, layer, x, router):
    p, dim, experts = f"layers.{layer}.moe.", cfg["dim"], cfg["num_experts"]
    width = cfg["expert_dim"] or cfg["ffn_dim"]
    logits = x @ w[p + "gate.weight"].T
    scores = 1 / (1 + torch.exp(-logits)) if cfg["scoring"] == "sigmoid" else torch.softmax(logits, -1)
    weights = scores * router.choose(layer, scores)
    weights = weights / weights.sum(-1, keepdim=True) * cfg["route_scale"]
    out = torch.zeros_like(x)
    for e in range(experts):
        w1, w3 = (w[p + f"experts.{name}"][e * width : (e + 1) * width] for name in ("w1", "w3"))
        out = out + weights[..., e : e + 1] * swiglu(x, w1, w[p + "experts.w2"][e * dim : (e + 1) * dim], w3)
    if cfg["shared_experts"]:
        out = out + swiglu(x, *(w[p + f"shared.w{i}.weight"] for i in (1, 2, 3)))
    return out


def forward(w, cfg, tokens, documents, router=None):
    batch, length = tokens.shape[:2]
    image, router = cfg["family"] == "image", router or Router(cfg)
    heads, kv_heads = cfg["num_heads"], cfg["num_kv_heads"]
    head_dim = cfg["head_width"] or cfg["dim"] // heads
    allowed = torch.ones(length, length, dtype=torch.bool).expand(batch, 1, length, length)
    allowed = allowed if image else allowed.tril()
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    if image:
        x = tokens.to(w["embed.weight"].dtype) @ w["embed.weight"].T + w["embed.bias"] + w["position.weight"][:length]
    else:
        x = w["embed.weight"][tokens]
    for i in range(cfg["num_layers"]):
        p = f"layers.{i}."
        h = rms_norm(x, w[p + "attention_norm.weight"], cfg["norm_eps"])

        def split(name, n, h=h, p=p):
            return (h @ w[p + f"attention.{name}.weight"].T).view(batch, length, n, head_dim).transpose(1, 2)

        q, k = split("wq", heads), split("wk", kv_heads)
        if not image:
            q, k = rope(q, cfg["rope_theta"]), rope(k, cfg["rope_theta"])
        v = split("wv", kv_heads).repeat_interleave(heads // kv_heads, dim=1)
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(head_dim)
        scores = scores.masked_fill(~allowed, float("-inf"))
        out = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, length, heads * head_dim)
        x = x + out @ w[p + "attention.wo.weight"].T
        h = rms_norm(x, w[p + "ffn_norm.weight"], cfg["norm_eps"])
        if cfg["family"] == "moe" and i >= cfg["dense_layers"]:
            x = x + mixture(w, cfg, i, h, router)
        else:
            x = x + swiglu(h, *(w[p + f"ffn.w{j}.weight"] for j in (1, 2, 3)))
    x = rms_norm(x, w["norm.weight"], cfg["norm_eps"])
    if image:
        return x @ w["head.weight"].T + w["head.bias"]
    return x @ (w["embed.weight"] if cfg["tied"] else w["head.weight"]).T


def loss_sum(w, cfg, batch, router=None):
    tokens, targets, weights, documents = batch
    logits = forward(w, cfg, tokens, documents, router)
    log_p = logits - torch.logsumexp(logits, -1, keepdim=True)
    return -(log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1) * weights).sum()


def train(w, cfg, opt, steps):
    """`steps`: for each step the list of all micro-batches and the learning rate. Returns the
    clipped gradients of the first step, the losses and norms, and the last weights. The balance loss counts
    in the gradients, not in the loss that is told."""
    w = {k: v.clone().requires_grad_() for k, v in w.items()}
    m = {k: torch.zeros_like(v) for k, v in w.items()}
    s = {k: torch.zeros_like(v) for k, v in w.items()}
    first, losses, norms, router = None, [], [], Router(cfg)
    for t, (batches, lr) in enumerate(steps, start=1):
        tokens = sum(int(b[2].sum()) for b in batches)
        router.begin()
        total = sum(loss_sum(w, cfg, b, router) for b in batches)
        names, pulled = list(w), (total + router.balance) / tokens
        grads = dict(zip(names, torch.autograd.grad(pulled, [w[n] for n in names]), strict=True))
        router.end()
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads.values()))
        if opt["clip"] > 0 and norm > opt["clip"]:
            grads = {k: g * (opt["clip"] / (norm + 1e-6)) for k, g in grads.items()}
        first = first or {k: g.clone() for k, g in grads.items()}
        losses.append(float(total.detach()) / tokens)
        norms.append(norm)
        with torch.no_grad():
            for k, g in grads.items():
                decay = opt["weight_decay"] if w[k].dim() > 1 else 0.0
                w[k] *= 1 - lr * decay
                m[k] += (1 - opt["beta1"]) * (g - m[k])
                s[k] += (1 - opt["beta2"]) * (g * g - s[k])
                m_hat = m[k] / (1 - opt["beta1"] ** t)
                s_hat = s[k] / (1 - opt["beta2"] ** t)
                w[k] -= lr * m_hat / (s_hat.sqrt() + opt["eps"])
    return first, losses, norms, {k: v.detach() for k, v in w.items()}
