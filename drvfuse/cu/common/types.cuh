// SPDX-License-Identifier: Apache-2.0
// Short names of the integer types, and a type chosen by a condition. No CUDA header is needed.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

template <bool Condition, typename Then, typename Else>
struct Choice {
    using Type = Then;
};
template <typename Then, typename Else>
struct Choice<false, Then, Else> {
    using Type = Else;
};
template <bool Condition, typename Then, typename Else>
using If = typename Choice<Condition, Then, Else>::Type;
