#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvq {

/// The two tensors that a layer caches: its keys and its values.
enum class Side : std::uint8_t { k, v };

inline constexpr std::array kSides = {Side::k, Side::v};

/// Place in an array of both sides.
constexpr std::size_t index(Side side) { return side == Side::k ? 0 : 1; }
constexpr Side other(Side side) { return side == Side::k ? Side::v : Side::k; }

/// "k" or "v", as names of tensors, JSON keys, flags and messages spell it.
constexpr const char* name(Side side) { return side == Side::k ? "k" : "v"; }
/// "keys" or "values".
constexpr const char* plural(Side side) { return side == Side::k ? "keys" : "values"; }

/// Number of the random stream of one KV head's keys, or of its values: the `head` of a RandomStream.
constexpr int stream(int kv_head, Side side) { return 2 * kv_head + (side == Side::v ? 1 : 0); }

}  // namespace kvq
