"""Every kernel under AddressSanitizer and ThreadSanitizer: nothing out of bounds, nothing unordered."""

import pytest

from tests.cuda.kernel_cases import CASES
from tests.cudasim.build import missing_sanitizer, missing_tool
from tests.cudasim.sanitized import run_case

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))


@pytest.mark.parametrize("flavour", ["asan", "tsan"])
def test_kernels_are_clean(flavour: str) -> None:
    if reason := missing_sanitizer(flavour):
        pytest.skip(reason)
    assert run_case(flavour, 2, "tests.cuda.kernel_cases:run", *CASES).fault == ""
