"""`sitecustomize` of vLLM's environment: an active Triton backend named cpu, so that with TRITON_INTERPRET=1
its kernels run in Triton's interpreter. Recorded routes need the model runner that asks for one.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend
    from triton.backends.driver import DriverBase

    class _Interpreted(DriverBase):
        """Never launches anything."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> None:
            return None

        def get_active_torch_device(self) -> str:
            return "cpu"

        def get_benchmarker(self) -> None:
            return None

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

    backends["cpu"] = Backend(BaseBackend, _Interpreted)
