#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvq {

/// The two tensors that a layer caches: its keys and its values.
enum class Side : std::uint8_t { k, v };

inline constexpr std::array kSides = {Side::k, Side::v};

/// Index in an array of both sides: 0 for keys, 1 for values.
constexpr std::size_t index(Side side) { return side == Side::k ? 0 : 1; }
constexpr Side other(Side side) { return side == Side::k ? Side::v : Side::k; }

/// "k" or "v": the spelling in tensor names, JSON keys, flags and messages.
constexpr const char* name(Side side) { return side == Side::k ? "k" : "v"; }
/// "keys" or "values".
constexpr const char* plural(Side side) { return side == Side::k ? "keys" : "values"; }

/// The argument `head` of the RandomStream for one side of one KV head.
constexpr int stream(int kv_head, Side side) { return 2 * kv_head + (side == Side::v ? 1 : 0); }

}  // namespace kvq
