"""The shape of the package: imports point down, nothing heavy is imported before it is needed."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "jaxtrain"

# From the command line down to the errors. A module imports only from lines below its own, or beside itself.
ROOMS = """
verify
rehearsal.trial
rehearsal.answers rehearsal.verdict rehearsal.shorten rehearsal.moments
rehearsal.child
rehearsal.compare rehearsal.rehearse
rehearsal.poison rehearsal.faults
rehearsal.inflict
compare_precision export predict prepare main sample commandline
train
loop.loop
describe result initialise storage.restart loop.nonfinite loop.agreement loop.opening
loop.advance
loop.intake
job
dispatch members
initialisers supply
contract
loop.profiler loop.behind loop.judge
evaluate
storage.mirror
storage.remote_lease
storage.checkpoint reporting.report storage.environment storage.workdir
storage.manifest storage.writing reporting.sinks
loop.watchdog loop.stopping
reporting.curves reporting.terminal storage.lease loop.pace loop.due
reporting.panels
reporting.parameters reporting.wording
replicas
step
state views tasks tasks.language_modelling tasks.multilabel tasks.regression tasks.segmentation
tasks.sequence_classification
tasks.classification
tasks.calibration tasks.confusion
model
adapters adapters.keras adapters.linen adapters.nnx
adapters.functional
models models.airbench models.cnn models.convnext models.decoder models.encoder models.mlp models.resnet models.rnn
models.unet models.vit models.wideresnet
models.transformer
models.attention models.layers
optim
muon schedules
weights weights.families weights.hub
weights.files weights.names
data.feed data.resident
data.host
data.inputs
data.csv
data.text
data data.tfds data.digits data.folder data.tokens
data.convert
data.pictures data.tfds_builder
data.records
data.example data.tensorflow_cpu data.indexcache
data.damage
data.sources data.vocabulary
data.roles data.order data.augment
loop.finite
flops metrics precision sharding
machine.devices
machine.compilecache machine.compiling machine.hardware machine.distributed
machine.cluster machine.peers
config
config.overrides config.configfile
config.grid config.keys
config.lookup
config.schema config.durations
storage.remote exits
causes
errors
loop machine rehearsal reporting storage
"""


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def imported(path):
    """Names of jaxtrain modules that a file imports, anywhere in it."""
    names = {name for name, _ in modules()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxtrain":
            base = (node.module or "").removeprefix("jaxtrain").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                yield inner if inner in names else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("jaxtrain."):
                    yield alias.name.removeprefix("jaxtrain.")


FLOORS = {name: number for number, line in enumerate(ROOMS.split("\n")) for name in line.split()}


@pytest.mark.parametrize(("name", "path"), [(n, p) for n, p in modules() if n != "__init__"], ids=lambda v: str(v))
def test_imports_point_down(name, path):
    assert name in FLOORS, f"{name} has no floor yet: put it into ROOMS"
    upward = [other for other in imported(path) if other and FLOORS[other] <= FLOORS[name] and other != name]
    assert not [other for other in upward if FLOORS[other] < FLOORS[name]], f"{name} imports upward: {upward}"


def test_every_room_exists():
    assert not FLOORS.keys() - {name for name, _ in modules()}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import jaxtrain", ["jax", "flax", "numpy", "tensorflow", "rich"]),
        ("import jaxtrain.main", ["jax", "flax", "tensorflow", "tensorflow_datasets"]),
        (
            "import jaxtrain; jaxtrain.train",
            ["tensorflow", "tensorflow_datasets", "sklearn", "matplotlib", "tensorboardX"],
        ),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(statement, absent):
    code = f"{statement}; import sys; print([name for name in {absent!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda v: str(v))
def test_a_file_is_read_in_one_sitting(name, path):
    text = path.read_text()
    assert text.lstrip().startswith('"""') or not text.strip(), f"{name} does not say what it is about"
    assert len(text.splitlines()) <= 520
