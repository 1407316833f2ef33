#include "calibrate_mpi/group_backend.h"

#include <kvq/dump/keep_tokens.h>

#include <fmt/format.h>

#include <optional>

namespace kvq {

namespace {

/// A message of the leader: which heads of which sequence, or the end.
struct Order {
  static constexpr int kEnd = -1;
  std::int64_t layer = kEnd, first = 0, count = 0, first_head = 0, heads = 0, scored = 0, has_counts = 0;

  std::vector<std::int64_t> numbers() const { return {layer, first, count, first_head, heads, scored, has_counts}; }
  static Order of(const std::vector<std::int64_t>& n) { return {n[0], n[1], n[2], n[3], n[4], n[5], n[6]}; }
};

/// One head's moments as numbers, without or with the column energies.
std::vector<double> packed(const AttentionMoments& moments, bool with_columns) {
  std::vector<double> numbers;
  for (const MomentSum* sum : {&moments.outputs, &moments.scored_query}) {
    numbers.insert(numbers.end(), sum->sum.begin(), sum->sum.end());
    numbers.insert(numbers.end(), sum->mean.begin(), sum->mean.end());
    numbers.push_back(sum->weight);
  }
  if (with_columns) numbers.insert(numbers.end(), moments.column_energy.begin(), moments.column_energy.end());
  return numbers;
}

/// Receives packed moments into moments of the same dimensions.
void receive_moments(const Channel& channel, int from, AttentionMoments& moments, std::int64_t columns) {
  moments.column_energy.assign(static_cast<std::size_t>(columns), 0.0);
  std::vector<double> numbers = packed(moments, true);
  channel.receive(from, numbers);
  auto next = numbers.begin();
  for (MomentSum* sum : {&moments.outputs, &moments.scored_query}) {
    for (std::vector<double>* part : {&sum->sum, &sum->mean}) {
      std::copy_n(next, part->size(), part->begin());
      next += static_cast<std::ptrdiff_t>(part->size());
    }
    sum->weight = *next++;
  }
  std::copy(next, numbers.end(), moments.column_energy.begin());
}

}  // namespace

GroupBackend::~GroupBackend() {
  for (std::size_t member = 1; member < ranks_.size(); ++member) channel_.send(ranks_[member], Order{}.numbers());
}

std::string GroupBackend::name() const { return fmt::format("cpu, {} processes", ranks_.size()); }

void GroupBackend::add_attention_moments(const SequenceAttention& sequence, bool with_scored_query,
                                         std::span<AttentionMoments> into, const std::function<void()>& head_done) {
  const int heads = sequence.geometry.num_kv_heads, size = static_cast<int>(ranks_.size());
  const auto begin = [&](int member) { return heads * member / size; };
  for (int member = 1; member < size; ++member) {
    const int to = ranks_[static_cast<std::size_t>(member)];
    const Order order{layer_,
                      sequence.first,
                      sequence.count,
                      begin(member),
                      begin(member + 1) - begin(member),
                      with_scored_query ? 1 : 0,
                      sequence.counts != nullptr ? 1 : 0};
    channel_.send(to, order.numbers());
    if (sequence.counts != nullptr) channel_.send(to, sequence.counts, sequence.k.tokens);
    // The member goes on with the sums of the sequences before, so that all are added in one order.
    for (int h = begin(member); h < begin(member + 1); ++h)
      channel_.send(to, packed(into[static_cast<std::size_t>(h)], false));
  }
  SequenceAttention own = sequence;
  own.first_kv_head = 0, own.kv_heads = begin(1);
  cpu_backend().add_attention_moments(own, with_scored_query, into, head_done);
  for (int member = 1; member < size; ++member)
    for (int h = begin(member); h < begin(member + 1); ++h) {
      receive_moments(channel_, ranks_[static_cast<std::size_t>(member)], into[static_cast<std::size_t>(h)],
                      sequence.count);
      if (head_done) head_done();
    }
}

void serve_group(const Channel& channel, int leader, const Dump& dump, const CollectRequest& request) {
  std::optional<LayerActivations> layer;
  for (;;) {
    std::vector<std::int64_t> numbers = Order{}.numbers();
    channel.receive(leader, numbers);
    const Order order = Order::of(numbers);
    if (order.layer == Order::kEnd) return;
    if (!layer || layer->layer != order.layer) {
      layer.reset();
      layer = dump.load_layer(static_cast<int>(order.layer));
      keep_tokens(*layer, request.tokens.first, request.tokens.count);
    }
    const LayerGeometry& geometry = layer->geometry;
    std::vector<std::uint8_t> counts;
    if (order.has_counts != 0) {
      counts.resize(static_cast<std::size_t>(layer->k.tokens));
      channel.receive(leader, counts);
    }
    const bool scored = order.scored != 0;
    std::vector<AttentionMoments> moments(
        static_cast<std::size_t>(geometry.num_kv_heads),
        {MomentSum{geometry.v_head_dim}, MomentSum{scored ? geometry.head_dim : 0}, {}});
    const auto end = order.first_head + order.heads;
    for (auto h = order.first_head; h < end; ++h)
      receive_moments(channel, leader, moments[static_cast<std::size_t>(h)], 0);
    cpu_backend().add_attention_moments({.geometry = geometry,
                                         .q = layer->q.view(),
                                         .k = layer->k.view(),
                                         .v = layer->v->view(),
                                         .first = order.first,
                                         .count = order.count,
                                         .counts = counts.empty() ? nullptr : counts.data(),
                                         .first_kv_head = static_cast<int>(order.first_head),
                                         .kv_heads = static_cast<int>(order.heads)},
                                        scored, moments, {});
    for (auto h = order.first_head; h < end; ++h)
      channel.send(leader, packed(moments[static_cast<std::size_t>(h)], true));
  }
}

}  // namespace kvq
