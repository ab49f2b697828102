// SPDX-License-Identifier: Apache-2.0
// Faults that are planted in kernels to see whether checks find them. `drvfuse check` plants faults that have occurred
// in other libraries, and the tests plant further ones. FAULT("name") is a constant, true only in kernels compiled with
// DRVFUSE_FAULT="name".
#pragma once

#ifndef DRVFUSE_FAULT
#define DRVFUSE_FAULT ""
#endif

namespace fault_detail {
__device__ constexpr bool same(const char* a, const char* b) {
    while (*a != 0 && *a == *b) ++a, ++b;
    return *a == *b;
}

template <bool VALUE>
struct Constant {
    enum : bool { value = VALUE };
};
}  // namespace fault_detail

#define FAULT(name) bool(fault_detail::Constant<fault_detail::same(DRVFUSE_FAULT, name)>::value)
