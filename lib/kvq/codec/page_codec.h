#pragma once

#include <kvq/core/side.h>
#include <kvq/plan/page_layout.h>
#include <kvq/plan/scheme.h>

#include <cstddef>
#include <cstdint>
#include <span>

/// The reference for pages: stores rows in a page and loads them, line by line as in formats/pages.md. Tests compare
/// this code with formats/page_vectors.json, and kernels that write or read pages with this code. Codes, scales and
/// minima come from RowCodec. Storing a row changes only that row's bits. Error{internal} if extents disagree or an
/// index is out of range.
namespace kvq {

/// A row in code tiles.
/// @param type     of the numbers; its bytes are those of the side's numbers
/// @param slot     of the page, 0 .. page_size - 1
/// @param codes    [D], each below 2^bits
/// @param numbers  [G] scales, then for affine [G] minima or zero points, each representable in `type`
/// @param page     [page_bytes()]
void store_page_row(const PageLayout& layout, Side side, ScaleType type, int head, int slot,
                    std::span<const std::uint8_t> codes, std::span<const float> numbers, std::span<std::byte> page);
void load_page_row(const PageLayout& layout, Side side, ScaleType type, int head, int slot,
                   std::span<const std::byte> page, std::span<std::uint8_t> codes, std::span<float> numbers);

/// A row in bit tiles. Bits and numbers of the side's rows that this head does not have are stored as zero.
/// @param segments  of the head: bit_segments()
/// @param codes     [D], each below 2^width of its segment; 0 in channels of no segment
/// @param numbers   [n], those of the head's row in the order of packing.md; n is at most the numbers of the side
void store_page_row(const PageLayout& layout, Side side, ScaleType type, int head, int slot,
                    std::span<const BitSegment> segments, std::span<const std::uint8_t> codes,
                    std::span<const float> numbers, std::span<std::byte> page);
void load_page_row(const PageLayout& layout, Side side, ScaleType type, int head, int slot,
                   std::span<const BitSegment> segments, std::span<const std::byte> page, std::span<std::uint8_t> codes,
                   std::span<float> numbers);

/// The index of a row's centroid, in code tiles and in bit tiles of a side that has indices.
/// @param centroid  0 .. 255, or 65535 if an index has two bytes
void store_page_index(const PageLayout& layout, Side side, int head, int slot, int centroid, std::span<std::byte> page);
int load_page_index(const PageLayout& layout, Side side, int head, int slot, std::span<const std::byte> page);

/// A row of a side that is exact in pages. @param row  [D] x_rot, rounded to bfloat16
void store_page_row(const PageLayout& layout, Side side, int head, int slot, std::span<const float> row,
                    std::span<std::byte> page);
void load_page_row(const PageLayout& layout, Side side, int head, int slot, std::span<const std::byte> page,
                   std::span<float> row);

/// Exact rows of the windows.
/// @param window_row  WindowLayout::row() of a position
/// @param row         [D] x_rot, rounded to bfloat16
/// @param slot        [slot_bytes()], one sink slot or ring
void store_window_row(const WindowLayout& layout, Side side, int head, int window_row, std::span<const float> row,
                      std::span<std::byte> slot);
void load_window_row(const WindowLayout& layout, Side side, int head, int window_row, std::span<const std::byte> slot,
                     std::span<float> row);

}  // namespace kvq
