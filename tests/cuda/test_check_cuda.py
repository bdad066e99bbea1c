"""The checks of compiled CUDA code pass what is good, and find every kind of fault in snippets."""

import pytest

from tools.check_cuda.accesses import (
    Expected,
    States,
    access_faults,
    expected_accesses,
    space_faults,
)
from tools.check_cuda.build import load_setup
from tools.check_cuda.imports import cuda_calls, import_faults
from tools.check_cuda.names import demangle, shorten, template_arguments
from tools.check_cuda.ptx import Function, arithmetic_faults, count_arithmetic, parse_ptx
from tools.check_cuda.resources import parse_log, spill_faults, summary, table

SYMBOL = (
    "_ZN12torchrec_ext4cuda18update_rows_kernelINS_4FtrlILb1EEENS_15NearestRoundingIfEEEEv"
    "NS0_10UpdateTaskINT0_10WeightTypeEEEPKNS0_4StepIT_EES6_i"
)
FTRL = "torchrec_ext::cuda::update_rows_kernel<{}, torchrec_ext::Ftrl<true>, torchrec_ext::{}<{}> >"

PTX = """
.version 9.0
.target sm_80
.extern .func (.param .b32 func_retval0) vprintf
(
	.param .b64 vprintf_param_0
)
;
.visible .entry kernel(
	.param .u64 kernel_param_0,
	.param .align 8 .b8 kernel_param_1[640]
)
.maxntid 128, 1, 1
{
	.reg .f32 	%f<20>;
	ld.param.u64 	%rd9, [kernel_param_0];
	cvta.to.global.u64 	%rd1, %rd9;
	ld.global.f32 	%f20, [%rd1];
	ld.global.f32 	%f21, [%rd1+4];
	ld.global.f32 	%f22, [%rd1+8];
	ld.global.f32 	%f23, [%rd1+12];
$L__BB0_1:  // a comment; mul.f32 in it
	@!%p1 bra 	$L__BB0_1;
	{ // callseq 0, 0
	st.param.b64 	[param0+0], %rd9;
	call.uni (retval0), vprintf, (param0, param1);
	}
	ld.global.nc.v4.f32 	{%f1, %f2, %f3, %f4}, [%rd2+16];
	@%p1 mul.rn.f32 	%f5, %f1, %f2;
	div.rn.f32 	%f6, %f5, %f3;
	sqrt.rn.f32 	%f7, %f6;
	mad.lo.s32 	%r1, %r2, %r3, %r4;
	add.s64 	%rd3, %rd2, 16;
	INSERTED
	st.global.v4.b32 	[%rd2], {%f1, %f2, %f3, %f4};
	ret;
}
"""

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_80'
ptxas info    : Function properties for kernel
    48 bytes stack frame, {} bytes spill stores, {} bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]
"""


def _kernel(inserted: str = "") -> Function:
    (function,) = parse_ptx(PTX.replace("INSERTED", inserted))
    return function


def test_finds_kernels_and_their_instructions_in_ptx():
    kernel = _kernel()
    assert kernel.symbol == "kernel" and kernel.is_kernel
    opcodes = [instruction.opcode for instruction in kernel.instructions]
    assert len(opcodes) == 17
    assert "ld.global.nc.v4.f32" in opcodes and "mul.rn.f32" in opcodes and opcodes[-1] == "ret"
    assert count_arithmetic([kernel]) == 3


def test_accepts_correctly_rounded_arithmetic():
    assert arithmetic_faults(_kernel("rcp.rn.f64 %fd1, %fd2; cvt.rn.f16.f32 %rs1, %f1;")) == []


@pytest.mark.parametrize(
    "instruction",
    [
        "mul.f32 %f8, %f1, %f2;",
        "add.f64 %fd1, %fd2, %fd3;",
        "sub.f32 %f8, %f1, %f2;",
        "@%p2 mul.f32 %f8, %f1, %f2;",
        "{ mul.f16 %rs1, %rs2, %rs3; }",
        "mul.rz.f32 %f8, %f1, %f2;",
        "fma.rn.f32 %f8, %f1, %f2, %f3;",
        "fma.rn.f64 %fd1, %fd2, %fd3, %fd4;",
        "mad.rn.f32 %f8, %f1, %f2, %f3;",
        "sqrt.approx.f32 %f8, %f1;",
        "rsqrt.approx.ftz.f32 %f8, %f1;",
        "div.full.f32 %f8, %f1, %f2;",
        "div.approx.f32 %f8, %f1, %f2;",
        "ex2.approx.f32 %f8, %f1;",
        "add.rn.ftz.f32 %f8, %f1, %f2;",
        "atom.global.add.f32 %f8, [%rd2], %f1;",
        "red.global.add.f64 [%rd2], %fd1;",
        "atom.global.add.noftz.f16x2 %r8, [%rd2], %r1;",
    ],
)
def test_finds_arithmetic_with_other_bits(instruction):
    (fault,) = arithmetic_faults(_kernel(instruction))
    assert "1 times" in fault


def test_integer_atomics_are_no_fault():
    assert arithmetic_faults(_kernel("atom.global.add.u32 %r8, [%rd2], %r1;")) == []


EXPECTED = Expected(stores={16: 1}, loads={16: 1})


def test_accepts_vector_accesses_and_scalar_loads_of_a_parameters_struct():
    assert access_faults(_kernel(), EXPECTED) == []
    assert space_faults(_kernel()) == []


def test_accepts_other_types_of_the_same_width():
    kernel = _kernel("st.global.v2.b64 [%rd4], {%rd5, %rd6}; ld.global.v2.u32 {%r1, %r2}, [%rd4];")
    assert access_faults(kernel, Expected(stores={16: 2}, loads={16: 1, 8: 1})) == []


@pytest.mark.parametrize(
    ("instructions", "fault"),
    [
        ("st.global.f32 [%rd4], %f1;", "1 stores of single float32s, expected up to 0"),
        ("st.global.u16 [%rd4], %rs1;", "1 stores of 2 bytes"),
        ("st.global.v2.f32 [%rd4], {%f1, %f2};", "1 stores of 8 bytes"),
        ("ld.global.u16 %rs1, [%rd4];", "1 loads of less than 4 bytes"),
        (
            "".join(f"ld.global.f32 %f{i}, [%rd4+{4 * i}];" for i in range(4)),
            "4 neighbouring values of 4 bytes at [%rd4+0]",
        ),
        (
            "cvta.to.global.u64 %rd4, %rd8;"
            + "".join(f"ld.global.f32 %f{i}, [%rd4+{4 * i}];" for i in range(4)),
            "4 neighbouring values of 4 bytes at [%rd4+0]",
        ),
        (
            "".join(f"ld.f32 %f{i}, [%rd4+{4 * i + 64}];" for i in range(4)),
            "4 neighbouring values of 4 bytes at [%rd4+64]",
        ),
    ],
)
def test_finds_columns_that_are_accessed_one_by_one(instructions, fault):
    (found,) = access_faults(_kernel(instructions), EXPECTED)
    assert fault in found


def test_finds_missing_vector_accesses():
    expected = Expected(stores={16: 2}, loads={16: 2})
    assert access_faults(_kernel(), expected) == [
        "1 loads of 16 bytes at once, expected 2 or more",
        "1 stores of 16 bytes at once, expected 2 or more",
    ]


def test_row_wise_states_may_be_stored_alone_but_no_more():
    expected = Expected(stores={16: 1}, loads={16: 1}, scalars=1)
    store = "st.global.f32 [%rd4], %f1;"
    assert access_faults(_kernel(store), expected) == []
    assert len(access_faults(_kernel(store + store), expected)) == 1


def test_finds_generic_addresses():
    (fault,) = space_faults(
        _kernel("st.v4.f32 [%rd4], {%f1, %f2, %f3, %f4}; st.local.u64 [%r1], 0;")
    )
    assert fault.startswith("1 generic addresses, first st.v4.f32 [%rd4]")


@pytest.mark.parametrize(
    ("name", "stores", "scalars"),
    [
        (FTRL.format(4, "NearestRounding", "float"), {16: 3}, 2),
        (FTRL.format(4, "StochasticRounding", "c10::Half"), {16: 2, 8: 1}, 2),
        ("torchrec_ext::cuda::(anonymous namespace)::store_sums_kernel<4>", {16: 1}, 0),
        ("torchrec_ext::cuda::per_sample_weight_grad_kernel<4, float>", {}, 1),
    ],
)
def test_expects_accesses_by_weights_and_states(name, stores, scalars):
    states = {"torchrec_ext::Ftrl<true>": States(per_column=2, per_row=1)}
    expected = expected_accesses(name, states)
    assert expected is not None
    assert (expected.stores, expected.scalars) == (stores, scalars)
    assert expected.loads[16] >= 1 and expected.vectors


@pytest.mark.parametrize(
    ("name", "stores", "loads", "scalars"),
    [
        (FTRL.format(1, "NearestRounding", "float"), {4: 12}, {4: 16, 2: 8}, None),
        (FTRL.format(1, "NearestRounding", "c10::Half"), {4: 8, 2: 4}, {4: 12, 2: 12}, None),
        ("torchrec_ext::cuda::store_sums_kernel<1>", {4: 4}, {4: 4, 2: 8}, None),
        ("torchrec_ext::cuda::per_sample_weight_grad_kernel<1, float>", {}, {4: 8, 2: 8}, 1),
        ("torchrec_ext::cuda::look_up_rows_kernel<long, float>", {4: 4, 2: 8}, {4: 4}, None),
        ("torchrec_ext::cuda::look_up_rows_kernel<int, c10::Half>", {4: 4, 2: 8}, {2: 4}, None),
    ],
)
def test_expects_single_columns_of_rows_of_any_width(name, stores, loads, scalars):
    states = {"torchrec_ext::Ftrl<true>": States(per_column=2, per_row=1)}
    expected = expected_accesses(name, states)
    assert expected is not None
    found = (expected.stores, expected.loads, expected.scalars, expected.vectors)
    assert found == (stores, loads, scalars, False)


def test_finds_vectors_where_columns_are_to_be_single():
    expected = Expected(stores={}, loads={}, scalars=None, vectors=False)
    halves = "ld.global.v2.u16 {%rs1, %rs2}, [%rd4]; ld.global.u16 %rs1, [%rd4];"
    struct = "ld.global.v2.f32 {%f20, %f21}, [%rd1];"
    assert [
        fault.partition(", ")[0] for fault in access_faults(_kernel(halves + struct), expected)
    ] == [
        "1 accesses of 2 values of 2 bytes at once",
        "2 accesses of 4 values of 4 bytes at once",
        "1 stores of 16 bytes",
    ]


def test_expects_nothing_of_other_kernels():
    assert (
        expected_accesses("torchrec_ext::cuda::begin_step_kernel<torchrec_ext::Lamb>", {}) is None
    )


def test_reads_resources():
    (resources,) = parse_log(LOG.format(0, 0))
    assert (resources.symbol, resources.architecture) == ("kernel", "sm_80")
    assert (resources.registers, resources.shared, resources.stack) == (40, 1024, 48)
    assert spill_faults([resources], {"kernel": "kernel"}) == []
    line = table([resources], {"kernel": "name"}).splitlines()[1]
    assert line.split() == ["name", "sm_80", "40", "0", "0", "48", "1024"]


@pytest.mark.parametrize(("stores", "loads"), [(16, 0), (0, 4)])
def test_finds_spills(stores, loads):
    resources = parse_log(LOG.format(stores, loads))
    (fault,) = spill_faults(resources, {"kernel": "update_rows"})
    assert fault == (
        f"update_rows on sm_80 spills registers: {stores} bytes of stores, {loads} bytes of loads"
    )
    assert "1 spill" in summary(resources)


def test_finds_spills_of_functions_that_kernels_call():
    log = LOG.format(0, 0) + (
        "ptxas info    : Function properties for helper\n"
        "    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n"
    )
    (fault,) = spill_faults(parse_log(log), {"kernel": "kernel", "helper": "helper"})
    assert fault.startswith("helper on sm_80")


@pytest.mark.parametrize(
    "symbol",
    [
        "cudaDeviceSynchronize",
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "cudaMemcpyToSymbol",
        "cudaMalloc",
        "cudaFree",
        "cudaHostAlloc",
        "cudaMemset",
        "cuStreamWaitValue32",
    ],
)
def test_finds_calls_that_wait(symbol):
    (fault,) = import_faults(["cudaLaunchKernelExC", symbol, "cos", "torch_call_dispatcher"])
    assert fault.startswith(f"the library calls {symbol}, ")


def test_accepts_calls_that_do_not_wait():
    symbols = ["__cudaRegisterFatBinary", "aoti_torch_get_current_cuda_stream", "cudaMemsetAsync"]
    assert import_faults(symbols) == []
    assert cuda_calls(symbols) == ["cudaMemsetAsync"]


def test_finds_functions_of_ours_that_nothing_defines():
    assert len(import_faults(["_ZN12torchrec_ext4cuda11update_rowsIfEEvv"])) == 1


def test_shortens_names():
    (name,) = demangle([SYMBOL]).values()
    assert shorten(name) == "update_rows<Ftrl<true>, NearestRounding<float>>"
    assert template_arguments(name) == [
        "torchrec_ext::Ftrl<true>",
        "torchrec_ext::NearestRounding<float>",
    ]


def test_reads_the_flags_of_setup_without_building():
    setup = load_setup()
    assert "--fmad=false" in setup.NVCC_FLAGS
    assert "-ffp-contract=off" in setup.COMPILE_FLAGS
