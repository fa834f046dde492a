"""What XLA is told beside the program itself."""

import jax
from jax.sharding import Mesh

# On a CPU, the convolutions of JAX 0.10 to 0.12 are YNNPACK's, whose gradients leave cores idle. Without them a step of
# a ResNet takes 0.7 to 0.85 of its time, one of the network of configs/cifar.py half. Products and sums stay with it.
_CPU = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"}
_MEASURED = ((0, 10), (0, 13))  # XLA refuses an option that it does not know, and its names are not for ever


def options(mesh: Mesh) -> dict[str, str]:
    """`compiler_options` for `jax.jit` of the programs that train, evaluate and predict on `mesh`.

    A program called within another must not have any.
    """
    first, beyond = _MEASURED
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return _CPU if on_cpu and first <= jax.__version_info__[:2] < beyond else {}
