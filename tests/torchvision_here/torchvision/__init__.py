"""torchvision, also beside torch's CPU wheel, where the wheel of PyPI fails to import.

That wheel registers operators that its library for CUDA has not defined. Video processors use none of them. This folder
is on the path of the tests and of the processes that they start: the module imports the installed package in its own
place, and leaves the registrations out only where the import fails without that.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

_HERE = str(Path(__file__).parents[1])


def _import_installed() -> None:
    spec = PathFinder.find_spec(__name__, [folder for folder in sys.path if folder != _HERE])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'torchvision'", name=__name__)
    module = module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


try:
    _import_installed()
except RuntimeError as error:
    if "operator torchvision::" not in str(error):
        raise
    for _name in ("_meta_registrations", "_autograd_registrations"):
        sys.modules[f"{__name__}.{_name}"] = ModuleType(f"{__name__}.{_name}")
    _import_installed()
