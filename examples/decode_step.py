# SPDX-License-Identifier: Apache-2.0
"""A decode step of a tensor-parallel transformer without a framework: one CUDA graph per GPU and token.

Each rank has its heads, its part of the feed-forward layer and its part of the vocabulary. A layer consists of these
launches:

    qkv = w_qkv . x              GEMV
    a = attention(qkv, cache)    the kernel below, which also appends to the cache
    x, r = norm(r + sum over ranks of w_out . a)
    x, r = norm(r + sum over ranks of w_down . silu(w_up . x))

Each norm is one launch together with the all-reduce and the residual add before it, and gives FP8 rows with a scale,
which the next product reads. The weights come from the file of safetensors that is named on the command line; without
one the program writes a small random model. The same step in numpy rounds as the ops do (`drvfuse.reference`).
Emulated GPUs give the bits of numpy's logits. A real GPU may give others, as its `expf` has other last bits.

    python examples/decode_step.py [MODEL]      # 2 GPUs; DRVFUSE_DRIVER=emu for emulated ones

Output:

    tokens of the GPUs: [7, 26, 63, 26, 63, 26]
    tokens of numpy:    [7, 26, 63, 26, 63, 26]
    largest error of a logit: 0.00 times the largest logit
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

import drvfuse as df
from drvfuse import reference

RANKS, LAYERS, HIDDEN, HEADS, HEAD, INNER, VOCABULARY = 2, 2, 256, 4, 64, 512, 64
LENGTH, FIRST, STEPS, EPSILON = 16, 7, 5, 1e-6
BF16 = ml_dtypes.bfloat16

SOURCE = r"""
constexpr int HEAD = 64, LENGTH = 16;

// One block per head, one thread per element of it. qkv: the queries of all heads, then the keys, then the values.
extern "C" __global__ void attend(const float* qkv, float* keys, float* values, const int* position, float* out) {
  __shared__ float scores[LENGTH];
  const int head = blockIdx.x, heads = gridDim.x, d = threadIdx.x, last = *position;
  const float* query = qkv + head * HEAD;
  keys += head * LENGTH * HEAD;
  values += head * LENGTH * HEAD;
  keys[last * HEAD + d] = query[heads * HEAD + d];
  values[last * HEAD + d] = query[2 * heads * HEAD + d];
  __syncthreads();
  for (int t = d; t <= last; t += HEAD) {
    float score = 0;
    for (int i = 0; i < HEAD; ++i) score += query[i] * keys[t * HEAD + i];
    scores[t] = score * 0.125f;  // 1 / sqrt(HEAD)
  }
  __syncthreads();
  float most = scores[0], sum = 0, x = 0;
  for (int t = 1; t <= last; ++t) most = fmaxf(most, scores[t]);
  for (int t = 0; t <= last; ++t) {
    const float weight = expf(scores[t] - most);
    sum += weight;
    x += weight * values[t * HEAD + d];
  }
  out[head * HEAD + d] = x / sum;
}
"""


# Weights in a file ------------------------------------------------------------------------------------------
def write_model(path: Path) -> None:
    """Write a random model to `path` as safetensors: the length of a JSON text, the text, then the tensors' bytes."""
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(BF16)

    tensors = {name: matrix(VOCABULARY, HIDDEN) for name in ("embedding", "head")} | {"norm": np.ones(HIDDEN, BF16)}
    for layer in range(LAYERS):
        tensors |= {
            f"{layer}.qkv": matrix(3 * HEADS * HEAD, HIDDEN),
            f"{layer}.out": matrix(HIDDEN, HEADS * HEAD),
            f"{layer}.up": matrix(INNER, HIDDEN),
            f"{layer}.down": matrix(HIDDEN, INNER),
            f"{layer}.norm1": random.uniform(0.5, 1.5, HIDDEN).astype(BF16),
            f"{layer}.norm2": random.uniform(0.5, 1.5, HIDDEN).astype(BF16),
        }
    header, offset = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.tobytes() for tensor in tensors.values()))


def read_model(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file. They stay in the file until they are used."""
    data = np.memmap(path, np.uint8, "r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length].tobytes()).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            assert entry["dtype"] == "BF16"
            tensors[name] = data[begin:end].view(BF16).reshape(entry["shape"])
    return tensors


# The model on GPUs ------------------------------------------------------------------------------------------
class Decoder:
    """The ranks' weights, caches and buffers, and the graphs of one step."""

    def __init__(self, group: df.Group, model: dict[str, np.ndarray]) -> None:
        self.group, self.model = group, model
        self.weights = [
            {name: rank.array(part(name, tensor, rank.index)) for name, tensor in model.items() if name != "embedding"}
            for rank in group
        ]
        module = df.compile(SOURCE, driver=group.driver, arch=group[0].device.arch)
        self.attend = module["attend"]
        self.silu = df.Epilogue("x / (1.0f + expf(-x))")

        def each(shape: int | tuple[int, ...], dtype: str) -> list[df.Array]:
            return [rank.zeros(shape, dtype) for rank in group]

        own = HEADS // RANKS * HEAD
        self.position, self.residual = each(1, "int32"), each((1, HIDDEN), "bfloat16")
        self.x, self.scale = each((1, HIDDEN), "float8_e4m3fn"), each(1, "float32")
        self.qkv, self.attended, self.inner = (each((1, n), "float32") for n in (3 * own, own, INNER // RANKS))
        self.partial, self.logits = each((1, HIDDEN), "bfloat16"), each((1, VOCABULARY // RANKS), "float32")
        self.cache = [(each((own, LENGTH), "float32"), each((own, LENGTH), "float32")) for _ in range(LAYERS)]
        self.all_logits = each((RANKS, VOCABULARY // RANKS), "float32")
        launches = self.prepare()  # compiles the kernels; nothing may be compiled or allocated during a capture
        with group.capture() as self.graphs:
            for launch in launches:
                launch()

    def prepare(self) -> list:
        """The launches of a step, each on all ranks."""
        launches = [self.first_norm()]
        for layer in range(LAYERS):
            following = f"{layer + 1}.norm1" if layer + 1 < LAYERS else "norm"
            launches += [
                self.product(f"{layer}.qkv", self.x, self.qkv, self.scale),
                self.attention(layer),
                self.product(f"{layer}.out", self.attended, self.partial),
                self.sum_and_norm(f"{layer}.norm2"),
                self.product(f"{layer}.up", self.x, self.inner, self.scale, self.silu),
                self.product(f"{layer}.down", self.inner, self.partial),
                self.sum_and_norm(following),
            ]
        launches.append(self.product("head", self.x, self.logits, self.scale))
        launches.append(df.all_gather.prepare(self.group, self.logits, self.all_logits).launch)
        return launches

    def first_norm(self):
        calls = [
            df.rmsnorm_fp8.prepare(residual, weights["0.norm1"], epsilon=EPSILON, output=x, scales=scale)
            for residual, weights, x, scale in zip(self.residual, self.weights, self.x, self.scale, strict=True)
        ]
        return lambda: [call.launch() for call in calls]

    def product(self, name: str, inputs: list, outputs: list, scales: list | None = None, epilogue=None):
        calls = [
            df.gemv_partial_norm.prepare(
                inputs[r],
                weights[name],
                None,
                n_normed=0,
                epsilon=EPSILON,
                act_scales=None if scales is None else scales[r],
                epilogue=epilogue,
                unnormed_output=outputs[r],
            )
            for r, weights in enumerate(self.weights)
        ]
        return lambda: [call.launch() for call in calls]

    def attention(self, layer: int):
        launches = []
        for r, rank in enumerate(self.group):
            keys, values = (half[r] for half in self.cache[layer])
            arguments = self.qkv[r], keys, values, self.position[r], self.attended[r]
            launches.append((self.attend.prepare(HEADS // RANKS, HEAD, *arguments, device=rank.device), rank.stream))
        return lambda: [launch(stream) for launch, stream in launches]

    def sum_and_norm(self, norm: str):
        return df.allreduce_rmsnorm_fp8.prepare(
            self.group,
            self.partial,
            [weights[norm] for weights in self.weights],
            epsilon=EPSILON,
            residuals=self.residual,
            residual_outputs=self.residual,
            outputs=self.x,
            scales=self.scale,
        ).launch

    def step(self, token: int, position: int) -> np.ndarray:
        """The logits of the token that follows this one."""
        for residual, place in zip(self.residual, self.position, strict=True):
            residual.copy_from(self.model["embedding"][token : token + 1])
            place.copy_from(np.array([position], np.int32))
        self.graphs.launch()
        self.group.synchronize()
        return self.all_logits[0].numpy().reshape(-1)


def part(name: str, tensor: np.ndarray, rank: int) -> np.ndarray:
    """A rank's part of a weight: some of its rows, or some of its columns if the ranks sum their products."""
    kind = name.rpartition(".")[2]
    if kind == "qkv":
        return tensor.reshape(3, RANKS, -1, HIDDEN)[:, rank].reshape(-1, HIDDEN)
    if kind in ("head", "up"):
        return np.split(tensor, RANKS)[rank]
    if kind in ("out", "down"):
        return np.ascontiguousarray(np.split(tensor, RANKS, axis=1)[rank])
    return np.asarray(tensor)


# The same model in numpy -------------------------------------------------------------------------------------
class Reference:
    """The model on all ranks, by `drvfuse.reference`, which rounds as the ops do. Attention is in float32."""

    def __init__(self, model: dict[str, np.ndarray]) -> None:
        self.model = model
        self.weights = [{name: part(name, tensor, r) for name, tensor in model.items()} for r in range(RANKS)]
        self.cache: list[list[list[np.ndarray]]] = [[[] for _ in range(RANKS)] for _ in range(LAYERS)]

    def step(self, token: int) -> np.ndarray:
        residual = self.model["embedding"][token : token + 1]
        x, scales, *_ = reference.rmsnorm_fp8(residual, self.model["0.norm1"], EPSILON)
        for layer, cache in enumerate(self.cache):
            following = f"{layer + 1}.norm1" if layer + 1 < LAYERS else "norm"
            qkv = self.product(f"{layer}.qkv", [x] * RANKS, scales)
            attended = [attend(*pair) for pair in zip(qkv, cache, strict=True)]
            partial = self.product(f"{layer}.out", attended, out_dtype=BF16)
            x, scales, residual = self.sum_and_norm(partial, f"{layer}.norm2", residual)
            inner = self.product(f"{layer}.up", [x] * RANKS, scales, lambda y: y / (1 + np.exp(-y)))
            partial = self.product(f"{layer}.down", inner, out_dtype=BF16)
            x, scales, residual = self.sum_and_norm(partial, following, residual)
        return np.concatenate(self.product("head", [x] * RANKS, scales), axis=1)[0]

    def product(self, name: str, inputs: list, scales=None, epilogue=None, out_dtype=np.float32) -> list:
        given = {"n_normed": 0, "epsilon": EPSILON, "act_scales": scales, "epilogue": epilogue, "out_dtype": out_dtype}
        return [
            reference.gemv.gemv_partial_norm(act, weights[name], None, **given).unnormed
            for act, weights in zip(inputs, self.weights, strict=True)
        ]

    def sum_and_norm(self, partial: list, norm: str, residual: np.ndarray) -> reference.Normalised:
        return reference.allreduce_rmsnorm_fp8(partial, self.model[norm], EPSILON, residual=residual)


def attend(qkv: np.ndarray, cache: list[np.ndarray]) -> np.ndarray:
    cache.append(qkv.reshape(3, -1, HEAD))
    query, (keys, values) = cache[-1][0], np.stack(cache, 2)[1:]
    scores = np.einsum("hd,htd->ht", query, keys) / np.float32(8)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return (np.einsum("ht,htd->hd", weights, values) / weights.sum(1, keepdims=True)).reshape(1, -1)


def main() -> None:
    if len(sys.argv) > 1:
        model = read_model(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder) / "model.safetensors")
            model = {name: np.array(t) for name, t in read_model(Path(folder) / "model.safetensors").items()}
    in_numpy, tokens, expected, worst = Reference(model), [FIRST], [FIRST], 0.0
    with df.Group.local(RANKS, max_blocks=16) as group:
        decoder = Decoder(group, model)
        for position in range(STEPS):
            exact = in_numpy.step(tokens[-1])
            logits = decoder.step(tokens[-1], position)
            worst = max(worst, float(abs(logits - exact).max() / abs(exact).max()))
            tokens.append(int(logits.argmax()))
            expected.append(int(exact.argmax()))
    print("tokens of the GPUs:", tokens)
    print("tokens of numpy:   ", expected)
    print(f"largest error of a logit: {worst:.2f} times the largest logit")


if __name__ == "__main__":
    main()
