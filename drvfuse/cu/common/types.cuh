// SPDX-License-Identifier: Apache-2.0
// Short names of the integer types. No CUDA header is needed.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
