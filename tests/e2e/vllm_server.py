"""A real vLLM with a tiny random model on the CPU: everything of a server except sensible words."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

MODEL_NAME = "tiny-llama"
BOOT_LIMIT_SECONDS = 240.0
"""A boot takes 35 to 60 s on two idle cores."""

_BUILD_MODEL = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

folder = sys.argv[1]
LlamaConfig(
    vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=131072, architectures=["LlamaForCausalLM"],
    dtype="bfloat16",
).save_pretrained(folder)
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
words = sorted({a + b + c + d for a in "bdklmnprst" for b in "aeiou" for c in "dlmnrst" for d in ("a", "en", "is")})
tokenizer.train_from_iterator(
    [" ".join(words[i : i + 40]) for i in range(0, len(words), 7)],
    trainers.BpeTrainer(
        vocab_size=1024, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"]
    ),
)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
"""


@dataclass(frozen=True)
class VllmServer:
    """A server that answers on ``url``; ``log`` holds what it printed."""

    url: str
    instance: str
    log: Path
    process_id: int


def build_model(python: str, folder: Path) -> Path:
    """The folder of the model's configuration and tokenizer, made on first use; weights are drawn by vLLM itself."""
    done = folder / ".complete"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(
            [python, "-c", _BUILD_MODEL, str(folder)], capture_output=True, text=True, timeout=180, check=False
        )
        assert made.returncode == 0, made.stderr[-3000:]
        done.touch()
    return folder


@contextmanager
def serve(
    python: str,
    model: Path,
    log: Path,
    *,
    port: int,
    otlp_endpoint: str | None,
    instance: str = "general-0",
    shard: str = "general",
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[VllmServer]:
    """Starts a server that sends its spans to ``otlp_endpoint`` (None: makes none), stops it at the end."""
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", MODEL_NAME, "--load-format", "dummy", "--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "40960", "--max-num-seqs", "8", "--max-num-batched-tokens", "2048"),
        *("--dtype", "bfloat16", "--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "2600"),
        *(("--otlp-traces-endpoint", otlp_endpoint) if otlp_endpoint else ()),
        "--disable-uvicorn-access-log",
        *arguments,
    ]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
        "OTEL_SERVICE_NAME": "vllm",
        "OTEL_RESOURCE_ATTRIBUTES": f"vllm.shard={shard},service.instance.id={instance},vllm.model={MODEL_NAME}",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
        **(environment or {}),
    }
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **settings}, start_new_session=True
        )
    try:
        _wait_until_healthy(process, url, log)
        yield VllmServer(url, instance, log, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(30)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + BOOT_LIMIT_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"vLLM did not become healthy; the end of its log:\n{log.read_text(errors='replace')[-4000:]}")
