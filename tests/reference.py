"""An independent plain PyTorch decoder, loss, clipping and AdamW, written from the formulas and
importing nothing of phalanx. What it computes on one process is what every layout must reproduce."""

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


def forward(w, cfg, tokens, documents):
    batch, length = tokens.shape
    heads, kv_heads, head_dim = cfg["num_heads"], cfg["num_kv_heads"], cfg["dim"] // cfg["num_heads"]
    allowed = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, length, length)
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    x = w["embed.weight"][tokens]
    for i in range(cfg["num_layers"]):
        p = f"layers.{i}."
        h = rms_norm(x, w[p + "attention_norm.weight"], cfg["norm_eps"])

        def split(name, n, h=h, p=p):
            return (h @ w[p + f"attention.{name}.weight"].T).view(batch, length, n, head_dim).transpose(1, 2)

        q, k, v = rope(split("wq", heads), cfg["rope_theta"]), rope(split("wk", kv_heads), cfg["rope_theta"]), None
        v = split("wv", kv_heads).repeat_interleave(heads // kv_heads, dim=1)
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(head_dim)
        scores = scores.masked_fill(~allowed, float("-inf"))
        out = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, length, heads * head_dim)
        x = x + out @ w[p + "attention.wo.weight"].T
        h = rms_norm(x, w[p + "ffn_norm.weight"], cfg["norm_eps"])
        gate = h @ w[p + "ffn.w1.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ w[p + "ffn.w3.weight"].T)) @ w[p + "ffn.w2.weight"].T
    x = rms_norm(x, w["norm.weight"], cfg["norm_eps"])
    return x @ (w["embed.weight"] if cfg["tied"] else w["head.weight"]).T


def loss_sum(w, cfg, batch):
    tokens, targets, weights, documents = batch
    logits = forward(w, cfg, tokens, documents)
    log_p = logits - torch.logsumexp(logits, -1, keepdim=True)
    return -(log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1) * weights).sum()


def train(w, cfg, opt, steps):
    """`steps`: for each step the list of all micro-batches and the learning rate. Returns the
    clipped gradients of the first step, the losses and norms, and the last weights."""
    w = {k: v.clone().requires_grad_() for k, v in w.items()}
    m = {k: torch.zeros_like(v) for k, v in w.items()}
    s = {k: torch.zeros_like(v) for k, v in w.items()}
    first, losses, norms = None, [], []
    for t, (batches, lr) in enumerate(steps, start=1):
        tokens = sum(int(b[2].sum()) for b in batches)
        total = sum(loss_sum(w, cfg, b) for b in batches)
        names = list(w)
        grads = dict(zip(names, torch.autograd.grad(total / tokens, [w[n] for n in names]), strict=True))
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
