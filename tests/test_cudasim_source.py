"""The pass over CUDA sources: asm statements and shared memory."""

import re

import pytest

from cudasim import build
from cudasim.snippets import HEAD, Array, body, filled, launch
from cudasim.source import SourceError, convert, expand
from krnl.backends.cuda_compiler import Kernel
from krnl.kernels.cuda import sources


def converted(text: str) -> str:
    return " ".join(convert(text).split()).replace("} ;", "};")


def test_an_instruction_becomes_a_call() -> None:
    text = 'asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(f(a, ")")));'
    assert converted(text) == '{ ptx::cvt_rn_bf16x2_f32((x), (high), (f(a, ")"))); };'


def test_addresses_lists_and_what_nobody_wants() -> None:
    text = (
        'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");\n'
        'asm("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"\n'
        '    ::"r"(row), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]));'
    )
    assert converted(text) == (
        "{ ptx::mbarrier_arrive_shared_cta_b64((b)); }; "
        "{ ptx::stmatrix_sync_aligned_m8n8_x4_shared_b16((row), (x[0]), (x[1]), (x[2]), (x[3])); };"
    )


def test_several_instructions_and_none() -> None:
    text = 'asm("bar.sync %0, %1;\\ncp.async.commit_group;" ::"n"(1), "r"(n)); asm("" : "+f"(x));'
    assert converted(text) == "{ ptx::bar_sync((1), (n)); ptx::cp_async_commit_group(); }; { };"


def test_products_are_given_their_sums_as_one() -> None:
    sums = ", ".join(f"%{i}" for i in range(32))
    operands = ", ".join(f'"+f"(x[{i}])' for i in range(32))
    text = (
        'asm volatile("{.reg .pred p;\\nsetp.ne.b32 p, %34, 0;\\n'
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        f'{{{sums}}}, %32, %33, p, 1, 1, 0, 1;}}"\n'
        f': {operands} : "l"(a), "l"(b), "r"(adds));'
    )
    given = ", ".join(f"(x[{i}])" for i in range(32))
    assert converted(text) == (
        f"{{ ptx::wgmma<64, false>(ptx::span<32>({given}), "
        "(a), (b), ((adds) != 0), 1, 1, 0, 1); };"
    )


@pytest.mark.parametrize("instruction", ["mma.sync.aligned.m8n8k4 %0, %0", "elect.sync _|p, %0"])
def test_an_instruction_that_is_not_known_is_named(instruction: str) -> None:
    text = f'# 1 "a.h"\n\nvoid f(int x) {{\n  asm("{instruction};" : "+r"(x));\n}}\n'
    name = re.escape(instruction.split()[0])
    with pytest.raises(SourceError, match=rf"a\.h:3: the simulator has no instruction {name};"):
        convert(text)


def test_branches_are_not_known() -> None:
    with pytest.raises(SourceError, match="branches"):
        convert('asm("@p bra done;" ::);')


def test_shared_arrays_are_the_blocks() -> None:
    """Several to a declaration, of several axes, aligned on either side, and single values."""
    statements = """
  __shared__ alignas(16) float a[2][32], b[32];
  __align__(8) __shared__ int c[4];
  __shared__ int one;
  a[0][threadIdx.x] = 1.0f, a[1][threadIdx.x] = 2.0f, b[threadIdx.x] = 3.0f;
  c[threadIdx.x % 4] = one = 4;
  __syncthreads();
  y[threadIdx.x] = a[0][31 - threadIdx.x] + a[1][threadIdx.x] + b[0] + c[3] + one;"""
    y = filled(32)
    launch(body(statements), y)
    assert (y.values == 14).all()


def test_arrays_of_different_kernels_are_their_own() -> None:
    """A template's array is one for each of its instances."""
    head = """
template <int kSize> __device__ int fill() {
  __shared__ int x[kSize];
  if (threadIdx.x == 0) x[kSize - 1] = kSize;
  __syncwarp();
  return x[kSize - 1];
}"""
    y = Array(filled(1).values.astype("i4"))
    launch(body("  y[0] = fill<3>() + 10 * fill<5>() + fill<3>();", "int *y", head), y)
    assert y.values[0] == 3 + 50 + 3


def test_shared_memory_that_is_declared_otherwise_is_not_known() -> None:
    with pytest.raises(SourceError, match=r"k.cu:2: .*__shared__ float x\[2\] = \{\};"):
        convert('# 1 "k.cu"\nvoid f() {\n  __shared__ float x[2] = {}; }')


def test_headers_are_put_in_place_once_and_keep_their_lines() -> None:
    headers = {"a.h": "#pragma once\nint a;\n", "b.h": '#include "a.h"\nint b;\n'}
    text = expand('#include "b.h"\n#include "a.h"\nint c;\n', "k.cu", headers)
    assert text.count("int a;") == 1
    assert '# 3 "k.cu"\nint c;' in text and '# 2 "b.h"\nint b;' in text
    with pytest.raises(SourceError, match=r"k.cu:2 includes 'd.h'"):
        expand('\n#include "d.h"\n', "k.cu", headers)


def test_all_of_krnls_sources_are_known() -> None:
    kernels = build.Kernels()
    for library in sources.libraries():
        assert "asm" not in re.findall(r"\w+", kernels._text(library))


def test_what_does_not_compile_is_the_compilers_complaint() -> None:
    kernels = build.Kernels(lambda library: HEAD + "__global__ void kernel() { x = 1; }")
    with pytest.raises(build.CompileError, match=r"broken.cu:2"):
        kernels[Kernel("broken", "kernel")]


def test_libraries_are_kept_by_what_they_are_made_of() -> None:
    def path(text: str, header: str) -> str:
        kernels = build.Kernels(lambda library: text, {"a.h": header})
        return str(kernels._compile(Kernel("kept", "kernel")))

    kernel = '#include "a.h"\n__global__ void kernel() {}'
    first = path(kernel, "// one")
    assert first == path(kernel, "// one")
    assert len({first, path(kernel, "int two;"), path(kernel + "\n", "int two;")}) >= 2
