# SPDX-License-Identifier: Apache-2.0
"""Time of FP8 RMSNorm forward and backward on a GPU, beside the floor, torch.compile and COAT's stored times.

    python tools/bench_fp8_rmsnorm.py --out results.json --plot results.png

Every figure is microseconds a call inside a CUDA graph of back-to-back calls over random data, rotated over enough
input sets that L2 does not serve them; the median of replays, and their spread. The floor is the bytes that must move
(x and its scales, qy and qy_t; x, scales, g and dx) over the bandwidth of a large copy in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import drvfuse as df
from drvfuse import dtypes

SHAPES = [
    (1, 2048),
    (16, 4096),
    (256, 4096),
    (2048, 2048),
    (2048, 4096),
    (8192, 2048),
    (4096, 5120),
    (8192, 4096),
    (4096, 11008),
    (16384, 4096),
    (8192, 8192),
]
COAT_US = {  # forward, backward, of one H200
    (1, 2048): (6.1, 6.6),
    (16, 4096): (7.9, 9.2),
    (256, 4096): (10.0, 14.6),
    (2048, 2048): (14.9, 32.2),
    (2048, 4096): (21.6, 38.9),
    (8192, 2048): (41.4, 96.8),
    (4096, 5120): (61.2, 80.8),
    (8192, 4096): (72.8, 118.0),
    (4096, 11008): (114.4, 175.1),
    (16384, 4096): (134.4, 222.8),
    (8192, 8192): (148.7, 177.6),
}
REPLAYS = 9
ROTATED_BYTES = 200 << 20
QB = 16


def per_call(device: df.Device, calls: Sequence[Callable[[], object]], least: int) -> tuple[float, float]:
    """(median, spread) of microseconds a call; the calls take turns inside a graph of at least `least` calls."""
    stream = device.stream
    for call in calls:
        call()
    device.synchronize()
    turns = -(-least // len(calls)) * len(calls)
    with df.Graph.capture(stream) as graph:
        for turn in range(turns):
            calls[turn % len(calls)]()
    start, end = df.Event(device, timing=True), df.Event(device, timing=True)
    times = []
    for _ in range(REPLAYS):
        graph.launch(stream)
        start.record(stream)
        graph.launch(stream)
        end.record(stream)
        device.synchronize()
        times.append(end.elapsed_ms(start) * 1000 / turns)
    graph.close()
    return statistics.median(times), max(times) - min(times)


COPY = """
extern "C" __global__ void __launch_bounds__(512) copy(const uint4* from, uint4* to, long long count) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i + 3 * step < count; i += 4 * step) {
        uint4 v[4];
        for (int k = 0; k < 4; ++k) v[k] = from[i + k * step];
        for (int k = 0; k < 4; ++k) to[i + k * step] = v[k];
    }
}
"""


def copy_bandwidth(device: df.Device) -> float:
    """Bytes a microsecond of a 1 GiB copy by a kernel of 16-byte accesses, read and written; the best of several."""
    nbytes = 1 << 30
    a, b = device.zeros(nbytes, "uint8"), device.zeros(nbytes, "uint8")
    a.copy_from(np.random.default_rng(0).integers(0, 256, nbytes, np.uint8))
    kernel = df.compile(COPY, driver=device.driver)["copy"]
    times = []
    for blocks in (4, 8, 32, 248):  # the last: four vectors a thread
        launch = kernel.prepare(blocks * device.sm_count, 512, a, b, nbytes // 16)
        times.append(per_call(device, [lambda launch=launch: launch(device.stream)], 20)[0])
    return 2 * nbytes / min(times)


def inputs(rows: int, columns: int, seed: int) -> tuple[np.ndarray, ...]:
    """x, s_x, w, g on the host, as a group quantiser would make them."""
    random = np.random.default_rng(seed)
    bf16, fp8 = dtypes.get("bfloat16").numpy, dtypes.get("float8_e4m3fn").numpy
    values = random.standard_normal((rows, columns // QB, QB), np.float32)
    scales = (np.abs(values).max(axis=2) + np.float32(1e-10)) / np.float32(448)
    x = (values / scales[..., None]).astype(fp8).reshape(rows, columns)
    w = (1 + 0.2 * random.standard_normal(columns)).astype(bf16)
    g = random.standard_normal((rows, columns), np.float32).astype(bf16)
    return x, scales.astype(bf16), w, g


def torch_times(rows: int, columns: int, hosts: tuple[np.ndarray, ...], sets: int) -> tuple[float, float]:
    """Microseconds of torch.compile's forward (global maximum, qy, qy_t) and backward of the same operator."""
    import torch

    x, s, w, g = (
        torch.from_numpy(h.view(np.uint8 if h.dtype.itemsize == 1 else np.int16).copy()).cuda() for h in hosts
    )
    x, s, w, g = x.view(torch.float8_e4m3fn), s.view(torch.bfloat16), w.view(torch.bfloat16), g.view(torch.bfloat16)

    def forward(x: Any, s: Any, w: Any) -> Any:
        xf = (x.float().view(rows, -1, QB) * s.float()[..., None]).view(rows, columns)
        rstd = torch.rsqrt(xf.square().mean(1) + 1e-5)
        y = xf * rstd[:, None] * w.float()
        scale = ((y.abs().amax() + 1e-10) / 448.0).bfloat16()
        q = (y.bfloat16().float() / scale.float()).to(torch.float8_e4m3fn)
        return q, scale, q.view(torch.uint8).t().contiguous(), rstd

    def backward(x: Any, s: Any, g: Any, w: Any, rstd: Any) -> Any:
        xf = (x.float().view(rows, -1, QB) * s.float()[..., None]).view(rows, columns)
        xhat = xf * rstd[:, None]
        gf = g.float()
        wdy = w.float() * gf
        c1 = (xhat * wdy).mean(1, keepdim=True)
        return ((wdy - xhat * c1) * rstd[:, None]).bfloat16(), (gf * xhat).sum(0).bfloat16()

    xs, ss, gs = ([t.clone() for _ in range(sets)] for t in (x, s, g))
    rstd = forward(x, s, w)[3]
    found = []
    for function, arguments in (
        (torch.compile(forward), [(a, b, w) for a, b in zip(xs, ss, strict=True)]),
        (torch.compile(backward), [(a, b, c, w, rstd) for a, b, c in zip(xs, ss, gs, strict=True)]),
    ):
        for values in arguments:
            function(*values)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for values in arguments:
                function(*values)
        times = []
        for _ in range(REPLAYS):
            graph.replay()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1000 / len(arguments))
        found.append(statistics.median(times))
        del graph
    return found[0], found[1]


def measure(device: df.Device, rows: int, columns: int, bandwidth: float, with_torch: bool) -> dict[str, Any]:
    """All figures of one shape."""
    elements = rows * columns
    hosts = inputs(rows, columns, rows * 65536 + columns)
    sets = min(64, max(3, ROTATED_BYTES // max(1, elements)))
    made = []
    w = device.array(hosts[2])
    for _ in range(sets):
        x, s, g = device.array(hosts[0]), device.array(hosts[1]), device.array(hosts[3])
        forward = (
            device.empty((rows, columns), "float8_e4m3fn"),
            device.empty((), "bfloat16"),
            device.empty((columns, rows), "float8_e4m3fn"),
            device.empty(rows, "float32"),
        )
        backward = (device.empty((rows, columns), "bfloat16"), device.empty(columns, "bfloat16"))
        made.append((x, s, g, forward, backward))

    def run_forward(item: Any) -> None:
        df.fp8_rmsnorm_forward(item[0], item[1], w, QB, 1e-5, outputs=item[3])

    def run_backward(item: Any) -> None:
        df.fp8_rmsnorm_backward(item[0], item[1], item[2], w, item[3][3], QB, outputs=item[4])

    least = 20 if elements >= 1 << 24 else 60
    result: dict[str, Any] = {"rows": rows, "columns": columns, "sets": sets}
    for name, run in (("forward", run_forward), ("backward", run_backward)):
        calls = [lambda item=item, run=run: run(item) for item in made]
        result[f"{name}_us"], result[f"{name}_spread"] = per_call(device, calls, least)
    result["forward_floor_us"] = (3.125 * elements + 4 * rows) / bandwidth
    result["backward_floor_us"] = (5.125 * elements + 4 * rows + 4 * columns) / bandwidth
    result["coat_forward_us"], result["coat_backward_us"] = COAT_US.get((rows, columns), (None, None))
    if with_torch:
        result["torch_forward_us"], result["torch_backward_us"] = torch_times(rows, columns, hosts, min(sets, 8))
    return result


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Times over the floor, both ways, beside COAT and torch.compile."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), sharey=True)
    large = [r for r in results if r["rows"] * r["columns"] >= 1 << 22]
    for axis, way in zip(axes, ("forward", "backward"), strict=True):
        series = (("drvfuse", f"{way}_us"), ("COAT (stored)", f"coat_{way}_us"), ("torch.compile", f"torch_{way}_us"))
        for offset, (label, key) in enumerate(series):
            heights = [(r.get(key) or 0) / r[f"{way}_floor_us"] for r in large]
            axis.bar([i + 0.27 * (offset - 1) for i in range(len(large))], heights, 0.27, label=label)
        axis.axhline(1, color="black", linewidth=1, linestyle="--")
        axis.set_xticks(range(len(large)), [f"{r['rows']}x{r['columns']}" for r in large], rotation=45, ha="right")
        axis.set_title(f"FP8 RMSNorm {way}")
    axes[0].set_ylabel("time / memory floor")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--torch", action="store_true", help="time torch.compile's versions too")
    arguments = parser.parse_args()
    device = df.device(0, driver="cuda")
    bandwidth = copy_bandwidth(device)
    print(f"{device.name}: copies {bandwidth / 1e6:.2f} TB/s")
    heads = [f"{way + ' us':>8} {'x floor':>8} {'COAT':>7} {'torch':>7}" for way in ("fwd", "bwd")]
    print(f"{'M x N':>12} " + " | ".join(heads))
    results = []
    for rows, columns in SHAPES:
        r = measure(device, rows, columns, bandwidth, arguments.torch)
        results.append({**r, "copy_bytes_us": bandwidth})
        cells = []
        for way in ("forward", "backward"):
            us, floor, other = r[f"{way}_us"], r[f"{way}_floor_us"], r.get(f"torch_{way}_us") or float("nan")
            cells.append(f"{us:>8.2f} {us / floor:>8.2f} {r[f'coat_{way}_us']:>7.1f} {other:>7.1f}")
        print(f"{f'{rows}x{columns}':>12} " + " | ".join(cells), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1))
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
