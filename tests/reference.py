"""An independent plain PyTorch decoder (dense or with experts), image classifier, loss, clipping and AdamW, written
from the formulas and importing nothing of phalanx. Every layout must reproduce its single-process results."""

import math

import torch


def rms_norm(x, weight, eps, offset=0):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * (offset + weight)


def has_window(cfg, layer):
    if not cfg["window"] or layer < cfg["window_from"]:
        return False
    return cfg["full_every"] == 0 or layer % cfg["full_every"] != cfg["full_every"] - 1


def wavelengths(cfg, local):
    """Return the positions per turn of every rotated pair, and the factor on queries and keys."""
    width = int((cfg["head_width"] or cfg["dim"] // cfg["num_heads"]) * cfg["rope_fraction"])
    own = local and cfg["rope_local_theta"] > 0
    theta = cfg["rope_local_theta"] if own else cfg["rope_theta"]
    waves = [2 * math.pi * theta ** (2.0 * e / width) for e in range(width // 2)]
    kind, factor, old = "none" if own else cfg["rope_scaling"], cfg["rope_factor"], cfg["rope_original"]
    if kind == "none":
        return waves, 1.0
    if kind == "linear":
        return [wave * factor for wave in waves], 1.0
    out = []
    for e, wave in enumerate(waves):
        if kind == "llama3":
            keep = (old / wave - cfg["rope_low"]) / (cfg["rope_high"] - cfg["rope_low"])
        else:
            # YaRN: a ramp runs between the pairs that turn rope_fast and rope_slow times, rounded to whole numbers.
            ends = [
                width * math.log(old / (2 * math.pi * turns)) / (2 * math.log(theta))
                for turns in (cfg["rope_fast"], cfg["rope_slow"])
            ]
            low, high = max(0, math.floor(ends[0])), min(width - 1, math.ceil(ends[1]))
            keep = 1 - (e - low) / (high - low if high != low else 1e-3)
        keep = min(1.0, max(0.0, keep))
        out.append(1 / (keep / wave + (1 - keep) / (wave * factor)))
    gain = 1.0 if kind == "llama3" else cfg["rope_gain"] or 1 + 0.1 * math.log(factor)
    return out, gain


def rope(x, cfg, local):  # x: (batch, heads, length, head_dim)
    waves, gain = wavelengths(cfg, local)
    length, half = x.shape[-2], len(waves)
    out = x.clone()
    position = torch.arange(length, dtype=torch.float64)
    for e, wave in enumerate(waves):
        angle = position * (2 * math.pi / wave)
        cos, sin = (gain * angle.cos()).to(x.dtype), (gain * angle.sin()).to(x.dtype)
        out[..., e] = x[..., e] * cos - x[..., e + half] * sin
        out[..., e + half] = x[..., e + half] * cos + x[..., e] * sin
    return out


class Router:
    """State of the expert layers beside the weights: the selection bias of each; the load since `begin`; and the terms
    added to the loss for gradients only: the balance loss of every sequence times its length, summed, and the
    z-loss."""

    def __init__(self, cfg):
        self.cfg, self.bias = cfg, {}
        self.begin()

    def begin(self):
        self.load, self.balance, self.z = {}, 0.0, 0.0

    def choose(self, layer, scores):
        """Return 0 or 1 for every sequence, token and expert."""
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
        """End the step: biases follow the loads."""
        for layer, load in self.load.items():
            step = self.cfg["balance_bias"] * torch.sign(load.mean() - load)
            self.bias[layer] = self.bias.get(layer, torch.zeros_like(load)) + step


def swiglu(x, w1, w2, w3, biases=(0, 0, 0), gelu=False):
    gate = x @ w1.T + biases[0]
    if gelu:
        gate = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        gate = gate * torch.sigmoid(gate)
    return (gate * (x @ w3.T + biases[2])) @ w2.T + biases[1]


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
        x = w["embed.weight"][tokens] * cfg["embedding_scale"]
    eps, offset = cfg["norm_eps"], 1 if cfg["norm_centered"] else 0

    def norm(name, x):
        return rms_norm(x, w[name + ".weight"], eps, offset)

    for i in range(cfg["num_layers"]):
        p, post, local = f"layers.{i}.", cfg["norm_place"] == "post", has_window(cfg, i)
        h = x if post else norm(p + "attention_norm", x)

        def split(name, n, which="", h=h, p=p):
            y = h @ w[p + f"attention.{name}.weight"].T + w.get(p + f"attention.{name}.bias", 0)
            if which and cfg["qk_norm"] == "all":
                y = norm(p + f"attention.wide_{which}_norm", y)
            y = y.view(batch, length, n, head_dim).transpose(1, 2)
            return norm(p + f"attention.{which}_norm", y) if which and cfg["qk_norm"] == "head" else y

        q, k = split("wq", heads, "q"), split("wk", kv_heads, "k")
        if not image:
            q, k = rope(q, cfg, local), rope(k, cfg, local)
        v = split("wv", kv_heads).repeat_interleave(heads // kv_heads, dim=1)
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        scores = (q @ k.transpose(-1, -2)) * (cfg["attention_scale"] or 1 / math.sqrt(head_dim))
        if cfg["attention_softcap"]:
            scores = cfg["attention_softcap"] * torch.tanh(scores / cfg["attention_softcap"])
        seen = allowed
        if local:
            at = torch.arange(length)
            seen = allowed & (at[:, None] - at[None, :] < cfg["window"])
        scores = scores.masked_fill(~seen, float("-inf"))
        out = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, length, heads * head_dim)
        out = out @ w[p + "attention.wo.weight"].T + w.get(p + "attention.wo.bias", 0)
        x = x + (out if cfg["norm_place"] == "pre" else norm(p + "attention_post_norm", out))
        h = x if post else norm(p + "ffn_norm", x)
        if cfg["family"] == "moe" and i >= cfg["dense_layers"]:
            out = mixture(w, cfg, i, h, router)
        else:
            biases = [w.get(p + f"ffn.w{j}.bias", 0) for j in (1, 2, 3)]
            out = swiglu(h, *(w[p + f"ffn.w{j}.weight"] for j in (1, 2, 3)), biases, cfg["activation"] == "gelu")
        x = x + (out if cfg["norm_place"] == "pre" else norm(p + "ffn_post_norm", out))
    x = norm("norm", x)
    if image:
        return x @ w["head.weight"].T + w["head.bias"]
    logits = x @ (w["embed.weight"] if cfg["tied"] else w["head.weight"]).T
    cap = cfg["logit_softcap"]
    return cap * torch.tanh(logits / cap) if cap else logits


def loss_sum(w, cfg, batch, router=None):
    tokens, targets, weights, documents = batch
    logits = forward(w, cfg, tokens, documents, router)
    normaliser = torch.logsumexp(logits, -1, keepdim=True)
    if router is not None:
        router.z = router.z + cfg["z_loss"] * (normaliser.squeeze(-1) ** 2 * weights).sum()
    log_p = logits - normaliser
    return -(log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1) * weights).sum()


def train(w, cfg, opt, steps):
    """Train. `steps`: for each step the list of all micro-batches and the learning rate. Return the clipped gradients
    of the first step, the losses and norms, and the last weights. The balance loss affects the gradients, not the
    reported loss."""
    w = {k: v.clone().requires_grad_() for k, v in w.items()}
    m = {k: torch.zeros_like(v) for k, v in w.items()}
    s = {k: torch.zeros_like(v) for k, v in w.items()}
    first, losses, norms, router = None, [], [], Router(cfg)
    for t, (batches, lr) in enumerate(steps, start=1):
        tokens = sum(int(b[2].sum()) for b in batches)
        router.begin()
        total = sum(loss_sum(w, cfg, b, router) for b in batches)
        positions = sum(b[1].numel() for b in batches)
        names, pulled = list(w), (total + router.z) / tokens + router.balance / positions
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
