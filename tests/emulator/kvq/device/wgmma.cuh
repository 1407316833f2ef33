#pragma once

#include <kvq/device/ptx.cuh>

/// Replaces lib/kvq/device/wgmma.cuh: the effects of its instructions on an emulated device.
namespace kvq::ptx {

using u64 = std::uint64_t;

inline u64 wgmma_panel(u32 address, int panel_bytes) {
  constexpr u64 kSwizzle128 = u64{1} << 62, kEightRows = u64{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | static_cast<u64>(panel_bytes >> 4) << 16 | (address & 0x3FFFF) >> 4;
}

/// An operand in shared memory, by its matrix descriptor. Its elements of two bytes lie in core matrices of eight rows
/// of 16 bytes, or in panels (128-byte swizzle) of eight rows of 128 bytes whose 16-byte chunks are permuted.
struct SharedOperand {
  u64 bits;

  u32 field(int shift) const { return static_cast<u32>(bits >> shift & 0x3FFF) << 4; }
  bool swizzled() const { return bits >> 62 == 1; }
  /// @param channels_in_rows  eight rows are eight channels of the sum, and the columns of the product lie along them;
  /// else a row has the channels of one column
  unsigned short at(int channel, int column, bool channels_in_rows) const {
    const u32 start = field(0), leading = field(16), stride = field(32);
    if (bits >> 62 != 0 && !swizzled()) emulator::fail("wgmma: an operand of another layout than panels and squares");
    const u32 row = static_cast<u32>(channels_in_rows ? channel : column),
              along = static_cast<u32>(channels_in_rows ? column : channel);
    u32 address;
    if (swizzled()) {
      address = start + row / 8 * stride + row % 8 * 128 + along % 64 * 2 + along / 64 * leading;
      address ^= (address >> 7 & 7) << 4;
    } else {
      if (channels_in_rows) emulator::fail("wgmma: squares of columns are not emulated");
      address = start + row / 8 * stride + row % 8 * 16 + along / 8 * leading + along % 8 * 2;
    }
    unsigned short value;
    std::memcpy(&value, shared_at(address, 2), 2);
    return value;
  }
};

struct WarpgroupLane {
  float* c;
  u64 a, b;
  u32 registers[4];
  bool a_in_registers, add;
};

/// Lane 4 g + t of warp w holds rows 16 w + g and 16 w + g + 8 of a and c: the words of a as in ProductLane, and the
/// columns 8 j + 2 t and 8 j + 2 t + 1 of c.
template <int kColumns, bool kBfloat, bool kTransposed>
void multiply_warpgroup(void* const (&lanes)[128]) {
  const auto number = [](unsigned short bits) { return kBfloat ? bfloat_half(bits, 0) : fp16_half(bits, 0); };
  const auto lane_of = [&](int i) { return static_cast<WarpgroupLane*>(lanes[i]); };
  static double a[64][16], b[16][kColumns];
  for (int i = 0; i < 128; ++i)
    if (lane_of(i)->b != lane_of(0)->b || lane_of(i)->a_in_registers != lane_of(0)->a_in_registers ||
        lane_of(i)->add != lane_of(0)->add || (!lane_of(0)->a_in_registers && lane_of(i)->a != lane_of(0)->a))
      emulator::fail("wgmma: threads of a warpgroup want different products");
  for (int channel = 0; channel < 16; ++channel) {
    for (int column = 0; column < kColumns; ++column)
      b[channel][column] = number(SharedOperand{lane_of(0)->b}.at(channel, column, kTransposed));
    for (int row = 0; row < 64; ++row) {
      if (lane_of(0)->a_in_registers) {
        const WarpgroupLane& lane = *lane_of(row / 16 * 32 + row % 8 * 4 + channel % 8 / 2);
        const u32 word = lane.registers[channel / 8 * 2 + row % 16 / 8];
        a[row][channel] = number(static_cast<unsigned short>(word >> (16 * (channel % 2))));
      } else {
        a[row][channel] = number(SharedOperand{lane_of(0)->a}.at(channel, row, false));
      }
    }
  }
  for (int row = 0; row < 64; ++row) {
    double sums[kColumns] = {};
    for (int channel = 0; channel < 16; ++channel)
      for (int column = 0; column < kColumns; ++column) sums[column] += a[row][channel] * b[channel][column];
    for (int column = 0; column < kColumns; ++column) {
      const WarpgroupLane& lane = *lane_of(row / 16 * 32 + row % 8 * 4 + column % 8 / 2);
      float& c = lane.c[column / 8 * 4 + row % 16 / 8 * 2 + column % 2];
      c = static_cast<float>((lane.add ? static_cast<double>(c) : 0.0) + sums[column]);
    }
  }
}

inline void wgmma_fence() {}
inline void wgmma_commit_group() {}
template <int kPending>
void wgmma_wait_group() {}
template <int kCount>
void pin(float (&)[kCount]) {}
template <int kRegisters>
void setmaxnreg_inc() {}
template <int kRegisters>
void setmaxnreg_dec() {}

template <int kCount>
void wgmma_m64k16_bf16(float (&c)[kCount], u64 a, u64 b, int add) {
  WarpgroupLane lane{c, a, b, {}, false, add != 0};
  emulator::meet_warpgroup("wgmma", &lane, multiply_warpgroup<2 * kCount, true, false>);
}
template <int kCount>
void wgmma_m64k16_fp16(float (&c)[kCount], u64 a, u64 b, int add) {
  WarpgroupLane lane{c, a, b, {}, false, add != 0};
  emulator::meet_warpgroup("wgmma", &lane, multiply_warpgroup<2 * kCount, false, false>);
}
template <int kTransposed = 1, int kCount>
void wgmma_m64k16_bf16(float (&c)[kCount], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
  WarpgroupLane lane{c, 0, b, {a0, a1, a2, a3}, true, add != 0};
  emulator::meet_warpgroup("wgmma", &lane, multiply_warpgroup < 2 * kCount, true, kTransposed != 0 >);
}
template <int kTransposed = 1, int kCount>
void wgmma_m64k16_fp16(float (&c)[kCount], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
  WarpgroupLane lane{c, 0, b, {a0, a1, a2, a3}, true, add != 0};
  emulator::meet_warpgroup("wgmma", &lane, multiply_warpgroup < 2 * kCount, false, kTransposed != 0 >);
}

}  // namespace kvq::ptx
