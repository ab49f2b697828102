// SPDX-License-Identifier: Apache-2.0
// Faults that are planted to see that they are found: by `drvfuse check` those that other systems have had, by the tests
// others. FAULT("name") is a constant, true only where a kernel is compiled with DRVFUSE_FAULT="name".
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
