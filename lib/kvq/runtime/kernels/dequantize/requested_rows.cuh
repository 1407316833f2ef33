#pragma once

#include <kvq/runtime/kernels/dequantize/params.h>
#include <kvq/runtime/kernels/common/sequences.cuh>

namespace kvq {

/// The rows of one sequence that a caller asks for.
struct RequestedRows {
  int begin = 0, end = 0;  ///< positions; with a fault as many as the sequence's part of the result has rows
  int first_row = 0;       ///< of the result
  SequenceTokens tokens = {};
  Fault fault = {};  ///< then the rows become NaN
};

__device__ __forceinline__ RequestedRows requested_rows(const DequantizeParams& p, int sequence) {
  RequestedRows rows;
  const CheckedSequence checked = load_whole_sequence(p.cache, sequence);
  rows.tokens = checked.tokens, rows.fault = checked.fault;
  const int length = rows.tokens.length;
  rows.begin = p.first ? min(max(0, p.first[sequence]), length) : 0;
  rows.end = p.last ? min(max(rows.begin, p.last[sequence]), length) : length;
  const int first = p.out_indptr[sequence], next = p.out_indptr[sequence + 1];
  rows.first_row = min(max(0, first), p.num_rows);
  const int room = max(0, min(max(0, next), p.num_rows) - rows.first_row);
  if (!rows.fault && (first < 0 || rows.end - rows.begin > room))
    rows.fault = {FaultCode::output_rows, std::int64_t{next} - first};
  if (rows.fault) rows.begin = 0, rows.end = room;
  return rows;
}

}  // namespace kvq
