"""Generate text from a checkpoint: the whole model on one device, one token after the other. It is plain on purpose,
without a cache of keys and values, because it is for looking and not for serving."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.checkpoint.files import Reader
from phalanx.checkpoint.torch_foreign import config_of, state_dict
from phalanx.core.errors import UserError
from phalanx.core.manifest import MANIFEST
from phalanx.core.store import is_remote, open_store
from phalanx.data.address import open_set
from phalanx.data.fetch import read_manifest
from phalanx.data.tokenizer import Bytes, Tokenizer, make_tokenizer, tokenizer_of
from phalanx.model.attention import Attend
from phalanx.model.family import Batch, load_family

ONE_THREAD_NUMEL = (
    20_000_000  # parameters; for a smaller model on a CPU, threads wait for each other more than they help
)


class Sampler:
    """The model of the checkpoint at `path`. `tokenizer` is `byte`, a path of a tokenizer.json, or "" for its
    data's."""

    def __init__(self, path: str, tokenizer: str = ""):
        place, _, name = path.rstrip("/").rpartition("/")
        reader = Reader(open_store(place or "."), name)
        job, self.config = reader.manifest.job, config_of(reader)
        self.context = int(job.get("train", {}).get("seq_len", 256))
        self.tokenizer = make_tokenizer(tokenizer) if tokenizer else _tokenizer_of(job, path)
        if self.tokenizer.vocabulary.size > self.config.vocab_size:
            raise UserError(
                f"its ids go to {self.tokenizer.vocabulary.size:,}, and the model knows {self.config.vocab_size:,}",
                field="--tokenizer",
                value=tokenizer,
                remedy="name the tokenizer that the model was trained with",
            )
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.device = accelerator or torch.device("cpu")
        self.model = self._load(path)
        if self.device.type == "cpu" and sum(each.numel() for each in self.model.parameters()) < ONE_THREAD_NUMEL:
            torch.set_num_threads(1)

    def _load(self, path: str) -> nn.Module:
        family, weights = load_family(self.config.family), state_dict(path)
        with torch.device("meta"):
            model = family.build(self.config)
        named = dict(model.named_parameters(remove_duplicate=False))
        first = {id(param): name for name, param in reversed(list(named.items()))}
        whole = {name: weights.get(name, weights.get(first[id(param)])) for name, param in named.items()}
        for name in weights.keys() - whole.keys():
            whole[name] = weights[name]  # buffers
        model.load_state_dict({name: each.float() for name, each in whole.items() if each is not None}, assign=True)
        return model.to(self.device).eval()

    @torch.no_grad()
    def write(self, prompt: str, count: int, temperature: float = 0.8, top_k: int = 50, seed: int = 0) -> Iterator[str]:
        """Continue the prompt token by token, and yield the text that each adds, until a document ends."""
        eos = self.tokenizer.vocabulary.eos
        ids = self.tokenizer.encode([prompt.encode()], [False]).astype(np.int64).tolist() or [eos]
        dice, written, shown = torch.Generator().manual_seed(seed), list[int](), ""
        for _ in range(count):
            logits_V = self._logits(torch.tensor([ids[-self.context :]], device=self.device))
            ids.append(_draw(logits_V[: self.tokenizer.vocabulary.size], temperature, top_k, dice))
            if ids[-1] == eos:
                return
            written.append(ids[-1])
            text = self.tokenizer.decode(np.array(written)).rstrip("\ufffd")  # a character may take several tokens
            yield text[len(shown) :]
            shown = text

    def _logits(self, tokens_BL: Tensor) -> Tensor:
        """Compute the logits of the last position."""
        batch = Batch(tokens_BL, torch.zeros_like(tokens_BL), torch.zeros_like(tokens_BL))
        for module in self.model.modules():
            if isinstance(module, Attend):
                module.prepare(batch, None, lambda tensor: tensor)
        out = self.model(batch)
        if not isinstance(out, Tensor) or out.shape[-1] != self.config.vocab_size or out.dim() != 3:
            raise UserError(
                "the model gives no logits over a vocabulary",
                field="model.family",
                value=self.config.family,
                remedy="generate with a family whose forward ends in a head over model.vocab_size",
            )
        return out[0, -1].float().cpu()


def _draw(logits_V: Tensor, temperature: float, top_k: int, dice: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits_V.argmax())
    if 0 < top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=dice))


def _tokenizer_of(job: dict[str, dict[str, str]], path: str) -> Tokenizer:
    """Return the tokenizer of the data set that the job names; a plain text is made into bytes."""
    source = job.get("data", {}).get("source", "")
    remedy = "name one: --tokenizer byte, or --tokenizer path/to/tokenizer.json"
    if is_remote(source) or (Path(source) / MANIFEST).is_file():
        store = open_set(source, "data.source")
        found = tokenizer_of(store, read_manifest(store, job["data"].get("version", ""))[0])
        if found is None:
            raise UserError("its data set came without a tokenizer", field="checkpoint", value=path, remedy=remedy)
        return found
    if job.get("model", {}).get("vocab_size") != Bytes.vocabulary.size:
        raise UserError("its tokenizer is not known", field="checkpoint", value=path, remedy=remedy)
    return Bytes()
