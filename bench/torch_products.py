"""Matrix products by PyTorch, which on CUDA are cuBLAS's. In any environment that has torch and
numpy:

    python bench/torch_products.py --layout nt --m 512 --n 2048 --k 2048 --steps 10

A step is many products, each with the next copy of the operands, so that a cache keeps none of
them; on CUDA it is one graph, and tn adds to a sum in fp32, as gradients are added up and as KRNL
does it everywhere."""

import torch
import torch_worker
from products import FIRST, arguments, drawn
from protocol import serve
from torch_worker import DEVICES, PRECISIONS, finish

options = arguments(__doc__.splitlines()[0], tuple(PRECISIONS), DEVICES).parse_args()
torch_worker.use_threads(options)
base, device = PRECISIONS[options.precision], options.device
a, b = (
    [torch.from_numpy(values).to(device, base, copy=True) for _ in range(options.copies)]
    for values in drawn(options.layout, options.m, options.n, options.k)
)
left = [each.T for each in a] if options.layout[0] == "t" else a
right = [each.T for each in b] if options.layout[1] == "t" else b
adds = options.layout == "tn" and device == "cuda"
kind = torch.float32 if adds else base
result = torch.zeros(options.m, options.n, dtype=kind, device=device)


def multiply() -> None:
    for i in range(options.calls):
        operands = left[i % options.copies], right[i % options.copies]
        if adds:
            torch.addmm(result, *operands, out_dtype=kind, out=result)
        else:
            torch.mm(*operands, out=result)


def described() -> dict[str, object]:
    """The norm of a product, and the first elements of its first row."""
    result.zero_()
    multiply()
    product = result.float() / (options.calls if adds else 1)
    return {"norm": float(product.norm()), "row": product[0, :FIRST].tolist()}


run = torch_worker.captured(multiply) if device == "cuda" else multiply


def step() -> dict[str, float]:
    run()
    return {}


serve(
    options,
    step,
    ("torch",),
    torch.get_num_threads,
    lambda: torch_worker.peak(device),
    described,
    lambda: finish(device),
)
