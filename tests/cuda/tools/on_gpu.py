"""Level 2: the first hour on a GPU, in five commands. Each writes a JSON record and a log, and ends within 4 minutes.

    on_gpu.py smoke build/gpu out      # `make gpu-smoke`: out/smoke.json and out/smoke.log
    on_gpu.py kernels build/gpu out
    on_gpu.py timings build/gpu out
    on_gpu.py jax build/gpu out
    on_gpu.py ranks build/gpu out --only "killed|2 ranks"    # builds, and the parts that match
    on_gpu.py jax build/gpu out --platform cpu --patience 4  # rehearses it without a GPU

Run them in this order: later commands use what earlier ones have built. Nothing is downloaded. A command ends with a
short table, and with status 1 if a part failed. How long parts take (takes_s) is guessed, for a machine with 16
processors; it decides what still begins when time runs out. `--only` runs the rest.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import sys

import measured
from measured import FLAGGED, HOST_COST, VIRTUAL_RANKS
from nccl_folder import OLDEST_NCCL, Nccl, find_nccl, jax_nccl, output, version_text
from runner import Part, Runner

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLES = ("fused_rmsnorm", "all_gather_matmul")
GPU = ROOT / "tests" / "cuda" / "gpu"
TOTAL_S = 235
PROGRAMS = {  # of tests/cuda/gpu/CMakeLists.txt, by the command that builds them
    "smoke": ("test_gpu_smoke",),
    "kernels": ("test_gpu_executor", "test_gpu_ll", "test_gpu_example", "test_gpu_rows"),
    "timings": ("bench_virtual_ranks", "bench_ll"),
    "ranks": ("test_gpu_executor",),
}
# Tests of build/native that emulate the kernels of the same source, for rehearsals.
EMULATED = {f"test_gpu_{name}": f"test_cuda_{name}" for name in ("smoke", "executor", "ll", "example")}
SHARES_GPU = 23000  # the first NCCL that accepts several ranks on one GPU
COMMAND_BUFFERS = {
    "off": "--xla_gpu_enable_command_buffer=",
    "on": "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer="
    "FUSION,CUBLAS,CUBLASLT,CUDNN,COLLECTIVES,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION",
}
PROBE = """import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0"""


def package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


class Machine:
    """The machine, and the environments of the programs that run on it."""

    def __init__(self, build: pathlib.Path, platform: str, nccl: str, patience: float = 1):
        self.build, self.platform, self.patience = build, platform, patience
        self.work = build / "work"
        self.empty_call = str(self.work / "empty_call.so")
        self.own_nccl = jax_nccl()
        self.nccl = find_nccl(nccl, self.own_nccl)
        name, _, rest = output(
            "nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"
        ).partition(", ")  # fmt: skip
        self.name, (self.driver, _, capability) = name, rest.partition(", ")
        self.capability = capability.splitlines()[0].replace(".", "") if capability else "90"
        self.no_gpu = "there is no NVIDIA GPU: " + name if name.startswith("unknown") else ""
        # All ranks together use one thread block per multiprocessor, which leaves most capacity to NCCL and XLA.
        self.ranks = {
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_MAX_CTAS": "2",
            "NCCL_CUMEM_HOST_ENABLE": "0",  # containers may forbid the system calls for it
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_DEBUG": "WARN",
            "JAX_LOCAL_DEVICE_IDS": "0",
            "JAXCOMM_MAX_SMS": "8",
            "JAXCOMM_TIMEOUT_S": "40",  # ranks compile at different speeds
            "JAXCOMM_ROUNDS": "200",
        }

    def facts(self) -> dict[str, object]:
        return {
            "device": self.name,
            "driver": self.driver,
            "cuda": output("nvcc", "--version").rpartition("release ")[2].partition(",")[0],
            "nccl": str(self.nccl),
            "nccl_of_jax": str(self.own_nccl),
            "jax": package("jax"),
            "jaxlib": package("jaxlib"),
            "plugin": package("jax-cuda13-plugin"),
            "python": sys.version.split()[0],
            "processors": len(os.sched_getaffinity(0)),
            "platform": self.platform,
            "gdrdrv": os.path.exists("/dev/gdrdrv"),
            "commit": os.environ.get("COMMIT") or output("git", "rev-parse", "HEAD"),
            "command": shlex.join(sys.argv),
        }

    def environment(self, nccl: Nccl | None = None, **more: str) -> dict[str, str]:
        """The environment of programs that import this build, JAX and the tests."""
        nccl = nccl or self.nccl
        path = [self.work / "site", self.work / "overlay", GPU, ROOT / "tests", ROOT]
        if not nccl.given:
            path.remove(self.work / "overlay")
        # Both variables, so that lookups by package folder and by name find the given NCCL.
        preload = {"LD_PRELOAD": str(nccl.path)} if nccl.given and self.platform == "cuda" else {}
        return {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PYTHONSAFEPATH": "1",  # otherwise Python would import this folder's jaxcomm, which has no native module
            "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "JAX_PLATFORMS": "cuda,cpu" if self.platform == "cuda" else "cpu",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAXCOMM_ALGORITHM": "plans",  # no self-test has passed yet
            "JAXCOMM_CALIBRATION": "",
            "JAXCOMM_EMPTY_CALL": self.empty_call,
            "JAXCOMM_COMMAND_BUFFERS": "as XLA has them",
            **preload,
            **more,
        }

    def lay_overlay(self) -> None:
        """A folder in which Python finds the given NCCL as nvidia.nccl."""
        if self.nccl.given:
            link = self.work / "overlay" / "nvidia" / "nccl"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(self.nccl.folder)

    def builds(self, *targets: str) -> list[Part]:
        """Builds programs and the module, at the same time. What earlier commands have built takes seconds."""
        programs = self.build / "programs"
        kept = all(os.path.exists(self.program(target)) for target in targets)
        jobs = str(max(len(os.sched_getaffinity(0)) // 2, 1))
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(programs), "-DJAXCOMM_GPU_TESTS=ON",
            f"-DCMAKE_CUDA_ARCHITECTURES={self.capability}",
        ]  # fmt: skip
        configure += ["-G", "Ninja"] if shutil.which("ninja") else []
        if self.nccl.headers >= SHARES_GPU:
            configure.append(f"-DJAXCOMM_NCCL_INCLUDE_DIR={self.nccl.folder}/include")
        compile_programs = ["cmake", "--build", str(programs), "-j", jobs, "--target", *targets]
        cuda = ["OFF"] if self.nccl.problem else ["ON"]
        if not self.nccl.problem:
            cuda.append(f"-Ccmake.define.JAXCOMM_NCCL_INCLUDE_DIR={self.nccl.folder}/include")
            cuda.append(f"-Ccmake.define.CMAKE_CUDA_ARCHITECTURES={self.capability}")
        install = [
            sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation",
            "--no-cache-dir", "--disable-pip-version-check", "--upgrade", "--target", str(self.work / "site"),
            f"-Cbuild-dir={self.build / 'module'}", f"-Ccmake.define.JAXCOMM_CUDA={cuda[0]}", *cuda[1:], str(ROOT),
        ]  # fmt: skip
        find = "import jax; print(jax.ffi.include_dir())"
        empty = f'exec c++ -std=c++17 -O2 -fPIC -shared -w -I"$("$0" -c "{find}")" "$1" -o "$2"'
        environment = {"PATH": self.environment()["PATH"], "CMAKE_BUILD_PARALLEL_LEVEL": jobs}
        both = f"{shlex.join(configure)} && exec {shlex.join(compile_programs)}"
        emulated = [EMULATED[target] for target in targets if target in EMULATED]
        missing = "needs a GPU" if self.platform == "cpu" and not emulated else ""
        if self.platform == "cpu":
            both = shlex.join(["cmake", "--build", str(ROOT / "build" / "native"), "-j", jobs, "--target", *emulated])
        return [
            Part("build: programs", ("/bin/sh", "-c", both), 220, environment, missing, takes_s=5 if kept else 100),
            Part("build: jaxcomm", tuple(install), 220, environment, takes_s=15 if self.has_module() else 90),
            Part(
                "build: empty call",
                ("/bin/sh", "-c", empty, sys.executable, str(GPU / "empty_call.cc"), self.empty_call),
                60,
                environment,
            ),
        ]

    def has_module(self) -> bool:
        return (self.work / "site" / "jaxcomm").exists()

    def program(self, name: str) -> str:
        if self.platform == "cpu":
            return str(ROOT / "build" / "native" / "tests" / "cuda" / EMULATED.get(name, name))
        return str(self.build / "programs" / "tests" / "cuda" / "gpu" / name)


def smoke_parts(machine: Machine) -> list[Part]:
    """The driver, one launch, and LL messages of 8 bytes."""
    program, missing = machine.program("test_gpu_smoke"), needs_gpu(machine)
    no_program = "" if machine.platform == "cpu" else missing
    return [
        Part("driver", (sys.executable, "-c", PROBE), 30, missing=missing),
        Part("launch and LL of 8 bytes", (program,), 30, missing=no_program, keep=True, after="build: programs"),
    ]


def needs_gpu(machine: Machine) -> str:
    return machine.no_gpu or ("needs a GPU" if machine.platform == "cpu" else "")


def kernel_parts(machine: Machine) -> list[Part]:
    """Kernels without JAX: virtual ranks in one launch, and the kernels of the module with a stream per rank."""
    executor, ll, rows = (machine.program(f"test_gpu_{name}") for name in ("executor", "ll", "rows"))
    programs = {
        "executor": ("/bin/sh", "-c", '"$0" && exec "$0" --full "in all shapes" "every type"', executor),
        "ll": ("/bin/sh", "-c", '"$0" && exec "$0" --full', ll),
        "executor, a stream per rank": (executor, "--full", "a stream per rank"),
        "rows, slices and one exchange": (rows,),
        "example, virtual ranks": (machine.program("test_gpu_example"),),
    }
    emulated = ("executor", "ll", "example, virtual ranks") if machine.platform == "cpu" else ()
    if emulated:  # emulation takes longer
        programs |= {"executor": (executor,), "ll": (ll,)}
    return [
        Part(name, command, 90, {}, "" if name in emulated else needs_gpu(machine), None, False, "build: programs", 25)
        for name, command in programs.items()
    ]


def sanitizer_parts(machine: Machine) -> list[Part]:
    sanitizer = shutil.which("compute-sanitizer")
    missing = needs_gpu(machine) or ("" if sanitizer else "there is no compute-sanitizer")
    executor = machine.program("test_gpu_executor")
    return [
        Part(
            f"executor, {tool}",
            (sanitizer or "compute-sanitizer", f"--tool={tool}", "--error-exitcode=1", executor),
            120,
            takes_s=45,
            missing=missing,
            after="build: programs",
        )
        for tool in ("memcheck", "racecheck", "synccheck")
    ]


def pytest_command(file: str, *more: str) -> tuple[str, ...]:
    # Without the fixtures of tests/conftest.py, which are for CPU devices, and without deprecation warnings.
    options = ("-p", "report", "--noconftest", "-p", "no:cacheprovider", "-o", "filterwarnings=", "-q")
    return ("-m", "pytest", *options, str(GPU / file), *more)


def pytest_part(
    machine: Machine, name: str, command: tuple[str, ...], limit_s: int, takes_s: int, missing: str,
    environment: dict[str, str],
) -> Part:  # fmt: skip
    folder = machine.work / "reports" / re.sub(r"\W+", "-", name)
    environment = environment | {"JAXCOMM_REPORTS": str(folder)}
    return Part(name, command, limit_s, environment, missing, folder, after="build: jaxcomm", takes_s=takes_s)


def jax_missing(machine: Machine) -> str:
    if machine.platform == "cpu":
        return ""
    return machine.no_gpu or machine.nccl.problem


def one_rank_parts(machine: Machine) -> list[Part]:
    return [
        pytest_part(
            machine, f"JAX, 1 rank, command buffers {state}", (sys.executable, *pytest_command("in_jax.py")), 120,
            75, jax_missing(machine), machine.environment(XLA_FLAGS=flags, JAXCOMM_COMMAND_BUFFERS=state),
        )
        for state, flags in COMMAND_BUFFERS.items()
    ]  # fmt: skip


def shared_missing(machine: Machine) -> str:
    """The reason why processes cannot share the GPU; empty if they can."""
    if missing := jax_missing(machine):
        return missing
    if machine.platform == "cuda" and machine.nccl.library < SHARES_GPU:
        return f"NCCL {version_text(machine.nccl.library)} does not allow two ranks on one GPU; 2.30 or later is needed"
    return ""


def shared_part(machine: Machine, ranks: int, takes_s: int, some: str = "") -> Part:
    """Processes that share the GPU. `some`: selected tests."""
    launcher = (sys.executable, "-m", "jaxcomm.run", "-n", str(ranks), "--grace", "2")
    command = (*launcher, *pytest_command("in_jax.py", *(["-k", some] if some else [])))
    environment = machine.environment(**machine.ranks)
    return pytest_part(machine, f"JAX, {ranks} ranks", command, 100, takes_s, shared_missing(machine), environment)


def selftest_part(machine: Machine) -> Part:
    """The self-test of users. Its record stays in the build folder: ranks that share a GPU show no speed."""
    launcher = (sys.executable, "-m", "jaxcomm.run", "-n", "2", "--grace", "2")
    # Status 3: all tests passed until the time ran out. `--only self-test` continues there.
    accept = '"$@"; status=$?; test $status = 3 || exit $status'
    selftest = (*launcher, "-m", "jaxcomm.selftest", "--timeout", f"{60 * machine.patience:g}")
    command = ("/bin/sh", "-c", accept, "sh", *selftest)
    own = machine.ranks | {"XDG_CACHE_HOME": str(machine.work / "cache")}
    environment = machine.environment(**own)
    del environment["JAXCOMM_ALGORITHM"]
    missing = shared_missing(machine)
    return Part("self-test, 2 ranks", command, 70, environment, missing, after="build: jaxcomm", takes_s=45)


def error_parts(machine: Machine) -> list[Part]:
    """Error texts, each in an environment with a different missing requirement."""

    def part(name: str, test: str, missing: str, nccl: Nccl | None = None, **more: str) -> Part:
        command = (sys.executable, *pytest_command("errors.py", "-k", test))
        return pytest_part(machine, name, command, 60, 30, missing, machine.environment(nccl, **more))

    no_gpu, no_module = needs_gpu(machine), machine.nccl.problem
    old = "" if machine.own_nccl.library and machine.own_nccl.library < OLDEST_NCCL else (
        f"JAX's own NCCL is {version_text(machine.own_nccl.library)}, not older than {version_text(OLDEST_NCCL)}"
    )  # fmt: skip
    has_module = "" if no_module else "the module could be built"
    return [
        part("errors: no windows", "no_windows", no_gpu or no_module, NCCL_WIN_ENABLE="0"),
        part("errors: old NCCL", "old_nccl", no_gpu or no_module or old, machine.own_nccl),
        part("errors: no module", "no_module", no_gpu or has_module),
    ]


def killed_part(machine: Machine) -> Part:
    command = (sys.executable, str(GPU / "killed.py"), "2")
    environment = machine.environment(**machine.ranks)
    missing, built = shared_missing(machine), "build: jaxcomm"
    return Part("errors: killed process", command, 60, environment, missing, keep=True, after=built, takes_s=20)


def training_parts(machine: Machine, ranks: int) -> list[list[Part]]:
    """models/moe on the GPU and, at the same time, on as many CPU devices; then the comparison."""
    script, seconds = str(GPU / "losses.py"), "12"
    folder = machine.work / f"training-{ranks}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    losses = {side: str(folder / f"{side}.json") for side in ("gpu", "cpu")}
    name = f"models/moe, {ranks} rank" + "s" * (ranks > 1)
    own = {"JAXCOMM_LOSSES": losses["gpu"], "JAXCOMM_TRAINING_FOLDER": str(folder / "gpu")}
    arguments = (script, seconds, str(ranks))
    command: tuple[str, ...] = (sys.executable, *arguments)
    environment, missing = machine.environment(**own), jax_missing(machine)
    if ranks > 1:
        command = (sys.executable, "-m", "jaxcomm.run", "-n", str(ranks), *arguments)
        environment, missing = machine.environment(**machine.ranks, **own), shared_missing(machine)
    cpu = machine.environment(JAX_PLATFORMS="cpu", JAXCOMM_LOSSES=losses["cpu"])
    cpu.pop("LD_PRELOAD", None)
    compare = (sys.executable, script, "compare", losses["gpu"], losses["cpu"])
    built = "build: jaxcomm"
    return [
        [
            Part(f"{name}: on the GPU", command, 80, environment, missing, after=built, takes_s=35),
            Part(f"{name}: on the CPU", (sys.executable, *arguments), 80, cpu, missing, after=built, takes_s=35),
        ],
        [Part(f"{name}: losses", compare, 30, machine.environment(), keep=True, after=f"{name}: on the GPU")],
    ]


def bench_parts(machine: Machine) -> list[Part]:
    missing = needs_gpu(machine)
    old = "" if machine.nccl.headers >= SHARES_GPU else (
        f"NCCL {version_text(machine.nccl.library)} does not allow two ranks on one GPU; 2.30 or later is needed"
    )  # fmt: skip
    built = "build: programs"
    virtual = (machine.program("bench_virtual_ranks"), "60")
    parts = [
        Part(FLAGGED, (machine.program("bench_ll"),), 30, {}, missing, None, True, built),
        Part(VIRTUAL_RANKS, virtual, 90, {}, missing, None, True, built, takes_s=60),
    ]
    for state, flags in COMMAND_BUFFERS.items():
        command = (sys.executable, str(ROOT / "benchmarks" / "gpu" / "host_cost.py"), machine.empty_call)
        environment = machine.environment(XLA_FLAGS=flags)
        name = f"{HOST_COST}, command buffers {state}"
        parts.append(Part(name, command, 50, environment, jax_missing(machine), None, True, "build: jaxcomm", 15))
    for ranks, ctas in ((2, 16), (4, 4), (8, 2)):  # more may hang: all thread blocks of all ranks must be resident
        library = str(machine.nccl.path) if machine.nccl.folder else ""
        command = (machine.program("bench_nccl_ranks"), library, str(ranks))
        environment = {**machine.ranks, "NCCL_MAX_CTAS": str(ctas), "CUDA_MODULE_LOADING": "EAGER"}
        parts.append(Part(f"NCCL, {ranks} ranks", command, 30, environment, missing or old, None, True, built))
    return parts


def example_parts(machine: Machine) -> list[Part]:
    """Users' kernels, built against the installed jaxcomm and called from jit on one rank."""
    missing = "needs a GPU" if machine.platform == "cpu" else jax_missing(machine)
    program = str(ROOT / "tests" / "cuda" / "tools" / "example_on_gpu.py")
    environment, built = machine.environment(), "build: jaxcomm"

    def part(name: str) -> Part:
        command = (sys.executable, program, name, machine.capability)
        return Part(f"examples/{name}, inside JAX", command, 150, environment, missing, after=built, takes_s=70)

    return [part(name) for name in EXAMPLES]


def smoke(machine: Machine, runner: Runner) -> None:
    runner.run(machine.builds(*PROGRAMS["smoke"])[0])
    for part in smoke_parts(machine):
        runner.run(part)


def kernels(machine: Machine, runner: Runner) -> None:
    runner.run(machine.builds(*PROGRAMS["kernels"])[0])
    for part in kernel_parts(machine):
        runner.run(part)


def timings(machine: Machine, runner: Runner) -> None:
    """One program at a time."""
    nccl = ["bench_nccl_ranks"] * (machine.nccl.headers >= SHARES_GPU)
    runner.run(*machine.builds(*PROGRAMS["timings"], *nccl))
    for part in bench_parts(machine):
        runner.run(part)


def inside_jax(machine: Machine, runner: Runner) -> None:
    """One rank: no process waits for another, so the examples may be compiled beside the tests."""
    _, *others = machine.builds()
    runner.run(*others)
    beside = runner.begin(*error_parts(machine), *example_parts(machine))
    for part in one_rank_parts(machine):
        runner.run(part)
    runner.end(beside)


def ranks(machine: Machine, runner: Runner) -> None:
    """Processes that share the GPU. What may take the GPU down comes last."""
    runner.run(*machine.builds(*PROGRAMS["ranks"]))
    runner.run(selftest_part(machine))
    runner.run(shared_part(machine, 2, 45))
    runner.run(shared_part(machine, 4, 20, "algorithm or thousands or beside or grows"))
    runner.run(killed_part(machine))
    runner.run(*sanitizer_parts(machine))
    for first, second in zip(training_parts(machine, 1), training_parts(machine, 2), strict=True):
        runner.run(*first, *second)


COMMANDS = {"smoke": smoke, "kernels": kernels, "timings": timings, "jax": inside_jax, "ranks": ranks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(COMMANDS))
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="a regular expression: run only the parts that it matches")
    parser.add_argument("--nccl", default="", help="folder with NCCL 2.30.7 or later, if that of JAX is older")
    parser.add_argument("--platform", choices=["cuda", "cpu"], default="cuda", help="cpu: rehearse what can be")
    parser.add_argument("--patience", type=float, default=1, help="multiplies all limits, for slow machines")
    args = parser.parse_args()
    machine = Machine(args.build.resolve(), args.platform, args.nccl, args.patience)
    machine.lay_overlay()
    runner = Runner(args.what, args.out, machine.work, machine.facts(), TOTAL_S, args.patience, args.only)
    try:
        COMMANDS[args.what](machine, runner)
    finally:
        if args.what == "timings":
            virtual, ll = runner.lines(VIRTUAL_RANKS), runner.lines(FLAGGED)
            runner.record["targets"] = measured.targets(virtual, ll, runner.lines(f"{HOST_COST}, command buffers off"))
            runner.record["machine"] = measured.machine_model(virtual, ll)
        runner.save()
        runner.print_table()
        if args.what == "timings":
            measured.print_table(runner)
    return 0 if runner.record["tests"] and all(runner.record["tests"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
