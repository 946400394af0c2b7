"""Text in the forms that `phalanx data build` reads."""

import gzip
import json
import random


def words(seed, count):
    rng = random.Random(seed)
    return " ".join(rng.choice(["the", "cat", "sat", "on", "mat", "grüß", "dich", "日本", "\n"]) for _ in range(count))


def lines(texts, field="text"):
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)).encode()


def train_bpe(path, special=("<|endoftext|>",), truncation=0):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator([words(s, 100) for s in range(5)], trainer)
    if truncation:
        tok.enable_truncation(truncation)
        tok.enable_padding(length=64)
        tok.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[(special[0], 0)])
    tok.save(str(path))
    return path


def write_all_kinds(folder):
    """Write the same texts in every form, and return the texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    texts = [words(s, 40) for s in range(30)]
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(texts))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(texts)))
    frames = [zstandard.ZstdCompressor().compress(lines(texts[i : i + 10])) for i in (0, 10, 20)]
    (folder / "c.jsonl.zst").write_bytes(b"".join(frames))
    pq.write_table(pa.table({"n": range(30), "text": texts}), folder / "d.parquet", row_group_size=7)
    return texts
