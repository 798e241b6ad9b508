"""Matrix products by PyTorch, which on CUDA are cuBLAS's. In any environment that has torch and
numpy:

    python bench/torch_products.py --layout nt --m 512 --n 2048 --k 2048 --steps 10

A step is many products, each with the next copy of the operands, so that a cache keeps none of
them; on CUDA it is one graph, and tn adds to a sum in fp32, as gradients are added up and as KRNL
does it everywhere. For that PyTorch 2.11 is known to do: `torch.addmm` has `out_dtype` since 2.8,
but at first took no sum of that type."""

import sys

import torch
import torch_worker
from products import FIRST, arguments, drawn
from torch_worker import DEVICES, PRECISIONS

options = arguments(__doc__.splitlines()[0], tuple(PRECISIONS), DEVICES).parse_args()
torch_worker.prepare(options)
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


def check_adding() -> None:
    """Ends with a sentence if this PyTorch does not add 16-bit products to a sum in fp32."""
    small = torch.zeros(16, 16, dtype=base, device=device)
    total = torch.zeros(16, 16, dtype=kind, device=device)
    try:
        torch.addmm(total, small, small, out_dtype=kind, out=total)
    except (TypeError, RuntimeError):
        sys.exit(
            f"PyTorch {torch.__version__} does not add products in {options.precision} to a sum in "
            "fp32 (torch.addmm with out_dtype), which tn on CUDA takes; PyTorch 2.11 does."
        )


def multiply() -> None:
    for i in range(options.calls):
        operands = left[i % options.copies], right[i % options.copies]
        if adds:
            torch.addmm(result, *operands, out_dtype=kind, out=result)
        else:
            torch.mm(*operands, out=result)


if adds:
    check_adding()
run = torch_worker.captured(multiply) if device == "cuda" else multiply


def described() -> dict[str, object]:
    """The norm of a product of what is timed, and the first elements of its first row."""
    result.zero_()
    run()
    product = result.float() / (options.calls if adds else 1)
    return {"norm": float(product.norm()), "row": product[0, :FIRST].tolist()}


def step() -> dict[str, float]:
    run()
    return {}


torch_worker.serve(options, step, described)
