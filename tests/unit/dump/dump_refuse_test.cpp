#include <kvq/dump/dump_file.h>

#include "support/dump_writer.h"
#include "support/error_of.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <sys/resource.h>

#include <cmath>
#include <limits>

using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;
using Catch::Matchers::Equals;

namespace {

/// The message of opening a good dump (one layer, 18 tokens, Hq 4, Hkv 2, D 8, Dv 6) after `damage`, without the
/// folder.
std::string open_fault(const Damage& damage) {
  const TempFolder folder;
  write_dump(folder / "a.h5", random_dump({}), damage);
  std::string text = error_text([&] { Dump::open({folder / "a.h5"}); });
  const std::string prefix = folder.path().string() + "/";
  for (auto at = text.find(prefix); at != text.npos; at = text.find(prefix)) text.erase(at, prefix.size());
  return text;
}

std::string load_fault(const DumpContent& content) {
  const TempFolder folder;
  write_dump(folder / "a.h5", content);
  std::string text = error_text([&] { Dump::open({folder / "a.h5"}).load_layer(0); });
  CHECK(error_text([&] { Dump::open({folder / "a.h5"}).check_layer(0); }) == text);
  const std::string prefix = folder.path().string() + "/";
  if (const auto at = text.find(prefix); at != text.npos) text.erase(at, prefix.size());
  return text;
}

Damage with_attribute(const std::string& object, const std::string& name, auto value) {
  return [=](hid_t file) { set_attribute(file, object, name, value); };
}

/// Replaces a dataset by `count` int64 numbers.
Damage with_integers(const std::string& path, const std::vector<std::int64_t>& values) {
  return [=](hid_t file) { set_dataset(file, path, H5T_STD_I64LE, {values.size()}, values.data()); };
}

/// Replaces /layers/0/q by a dataset with the given properties and type but without data.
Damage with_empty_q(hid_t type, const std::vector<hsize_t>& shape, const std::function<void(hid_t)>& set_up = {}) {
  return [=](hid_t file) {
    remove_link(file, "/layers/0/q");
    const hid_t space = H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
    const hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
    if (set_up) set_up(creation);
    const hid_t dataset = H5Dcreate2(file, "/layers/0/q", type, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    REQUIRE(dataset >= 0);
    H5Dclose(dataset);
    H5Pclose(creation);
    H5Sclose(space);
    set_attribute(file, "/layers/0/q", "kvq_dtype", "float32");
  };
}

constexpr const char* kLayer = "/layers/0";

}  // namespace

TEST_CASE("An undamaged dump opens", "[dump]") { CHECK(open_fault({}) == "no error"); }

TEST_CASE("Another format or a newer version is refused", "[dump]") {
  CHECK(open_fault(with_attribute("/", "format", "kvq-artifact")) ==
        "bad_input: a.h5: expected format kvq-dump, found 'kvq-artifact'");
  CHECK(open_fault(with_attribute("/", "version", "2.0")) ==
        "unsupported: a.h5: kvq-dump version 2.0 is not supported, expected 1.x");
  CHECK(open_fault(with_attribute("/", "version", "1.7")) == "no error");
  CHECK(open_fault(with_attribute("/", "requires", "")) == "no error");
  CHECK_THAT(open_fault(with_attribute("/", "requires", "sparse")), Contains("unsupported: a.h5: requires 'sparse'"));
  for (const char* version : {"", "1", "1.", ".0", "1.x", "01.0", "-1.0", "1.0.0", "1.99999999999"})
    CHECK_THAT(open_fault(with_attribute("/", "version", version)),
               Contains("bad_input: a.h5: version: expected major.minor"));
}

TEST_CASE("Caps and sinks are refused unless `requires` names them and they are numbers", "[dump]") {
  const auto with_cap = [](double cap) {
    return [cap](hid_t file) {
      set_attribute(file, "/", "requires", "logit_softcapping");
      set_attribute(file, kLayer, "logit_softcapping", cap);
    };
  };
  CHECK(open_fault(with_cap(50.0)) == "no error");
  for (const double cap : {0.0, -1.0, 1e7, std::numeric_limits<double>::quiet_NaN()})
    CHECK_THAT(open_fault(with_cap(cap)),
               Contains("layer 0: logit_softcapping: expected a positive number up to 1e+06"));
  CHECK_THAT(open_fault([](hid_t file) { set_attribute(file, kLayer, "logit_softcapping", 50.0); }),
             Contains("layer 0: has logit_softcapping, which `requires` does not list"));
  const auto with_sinks = [](const std::vector<double>& sinks) {
    return [sinks](hid_t file) {
      set_attribute(file, "/", "requires", "sink_logits");
      set_dataset(file, "/layers/0/sink_logits", H5T_IEEE_F64LE, {sinks.size()}, sinks.data());
    };
  };
  CHECK(open_fault(with_sinks({0.0, 1.0, -2.0, 3.0})) == "no error");
  CHECK_THAT(open_fault(with_sinks({0.0})), Contains("sink_logits: expected shape [4], found [1]"));
  CHECK_THAT(open_fault(with_sinks({0.0, 1e7, 0.0, 0.0})), Contains("query head 1: expected a magnitude up to 1e+06"));
}

TEST_CASE("Every missing root attribute is named", "[dump]") {
  for (const char* name : {"format", "version", "model_name", "capture_point", "num_layers", "producer"})
    CHECK(open_fault([&](hid_t file) { remove_attribute(file, "/", name); }) ==
          fmt::format("bad_input: a.h5: attribute {} is missing", name));
}

TEST_CASE("Every missing layer attribute is named", "[dump]") {
  for (const char* name : {"num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "softmax_scale", "sliding_window",
                           "kind", "rope_layout", "rotary_dim", "rotary_offset"})
    CHECK(open_fault([&](hid_t file) { remove_attribute(file, kLayer, name); }) ==
          fmt::format("bad_input: a.h5: layer 0: attribute {} is missing", name));
}

TEST_CASE("Every missing dataset is named", "[dump]") {
  for (const char* name : {"cu_seqlens", "positions", "layers"})
    CHECK(open_fault([&](hid_t file) { remove_link(file, name); }) ==
          fmt::format("bad_input: a.h5: {}: is missing", name));
  for (const char* name : {"q", "k", "v", "rope_inv_freq"})
    CHECK(open_fault([&](hid_t file) { remove_link(file, std::string(kLayer) + "/" + name); }) ==
          fmt::format("bad_input: a.h5: layer 0: {}: is missing", name));
}

TEST_CASE("All independent faults of a file come together", "[dump]") {
  const std::string text = open_fault([](hid_t file) {
    remove_attribute(file, "/", "producer");
    set_attribute(file, "/", "capture_point", "mid_rope");
    set_attribute(file, kLayer, "head_dim", 2000);
    set_attribute(file, kLayer, "softmax_scale", -1.0);
  });
  CHECK_THAT(text, Equals("bad_input: a.h5: capture_point 'mid_rope' is not supported, expected post_rope or pre_rope\n"
                          "a.h5: attribute producer is missing\n"
                          "a.h5: layer 0: head_dim: expected 1 to 1024, found 2000\n"
                          "a.h5: layer 0: softmax_scale: expected a positive number up to 100, found -1"));
}

TEST_CASE("Attributes of the wrong type or value are refused", "[dump]") {
  const auto layer_fault = [](const char* name, auto value) { return open_fault(with_attribute(kLayer, name, value)); };
  CHECK(layer_fault("num_q_heads", 0) == "bad_input: a.h5: layer 0: num_q_heads: expected 1 to 4096, found 0");
  CHECK(layer_fault("num_q_heads", 5) == "bad_input: a.h5: layer 0: num_q_heads 5 is not a multiple of num_kv_heads 2");
  CHECK_THAT(layer_fault("num_q_heads", 4.0), Contains("attribute num_q_heads: expected an integer, found float64"));
  CHECK_THAT(layer_fault("num_q_heads", "4"), Contains("attribute num_q_heads: expected an integer, found string"));
  CHECK_THAT(layer_fault("kind", 4), Contains("attribute kind: expected a string, found int64"));
  CHECK_THAT(layer_fault("softmax_scale", "x"), Contains("attribute softmax_scale: expected a float, found string"));
  CHECK_THAT(layer_fault("softmax_scale", std::numeric_limits<double>::quiet_NaN()),
             Contains("expected a positive number up to 100, found nan"));
  CHECK_THAT(layer_fault("sliding_window", -1), Contains("sliding_window: expected 0 to 1073741823, found -1"));
  CHECK_THAT(layer_fault("kind", "mamba"), Contains("unsupported: a.h5: layer 0: kind 'mamba' is not supported"));
  CHECK_THAT(layer_fault("kind", "mla_rope"), Contains("num_kv_heads: expected 1 for kind mla_rope, found 2"));
  CHECK_THAT(layer_fault("rope_layout", "spiral"),
             Contains("unsupported: a.h5: layer 0: rope_layout 'spiral' is not supported"));
  CHECK_THAT(layer_fault("rope_layout", "none"), Contains("rotary_dim: expected 0 for rope_layout none, found 8"));
  CHECK_THAT(layer_fault("rotary_dim", 7), Contains("rotary_dim: expected a positive even number, found 7"));
  CHECK_THAT(layer_fault("rotary_offset", 2), Contains("the rotary slice [2, 10) reaches beyond head_dim 8"));
  CHECK_THAT(layer_fault("rope_attention_factor", 0.0), Contains("rope_attention_factor: expected a positive number"));
  CHECK_THAT(open_fault(with_attribute("/", "model_name", "\xff")),
             Contains("attribute model_name: expected UTF-8, found '\\xff'"));
  CHECK_THAT(open_fault(with_attribute("/", "model_fingerprint", "abc")),
             Contains("expected 64 lower-case hex digits, found 'abc'"));
  CHECK_THAT(open_fault(with_attribute("/layers/0/q", "kvq_dtype", "float8")),
             Contains("layer 0: q: kvq_dtype 'float8' is not supported"));
  CHECK_THAT(open_fault(with_attribute("/layers/0/q", "kvq_dtype", "bfloat16")),
             Contains("layer 0: q: kvq_dtype bfloat16 is stored as uint16, found float32"));
}

TEST_CASE("An attribute may have any integer type, and one value", "[dump]") {
  const auto with_type = [](hid_t type, const void* value, hsize_t count) {
    return open_fault([=](hid_t file) {
      remove_attribute(file, kLayer, "num_q_heads");
      const hid_t space = H5Screate_simple(1, &count, nullptr);
      const hid_t attribute =
          H5Acreate_by_name(file, kLayer, "num_q_heads", type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
      H5Awrite(attribute, type, value);
      H5Aclose(attribute);
      H5Sclose(space);
    });
  };
  const std::uint8_t byte = 4;
  const std::uint64_t large = std::numeric_limits<std::uint64_t>::max();
  const std::int32_t two[] = {4, 4};
  CHECK(with_type(H5T_STD_U8LE, &byte, 1) == "no error");
  CHECK(with_type(H5T_STD_I32LE, two, 1) == "no error");
  CHECK_THAT(with_type(H5T_STD_U64LE, &large, 1), Contains("num_q_heads: expected 1 to 4096"));
  CHECK_THAT(with_type(H5T_STD_I32LE, two, 2), Contains("attribute num_q_heads: expected one value"));
  CHECK_THAT(with_type(H5T_STD_I32BE, two, 1), Contains("expected an integer, found big-endian int32"));
}

TEST_CASE("Sequences that make no sense are refused", "[dump]") {
  CHECK(open_fault(with_integers("/cu_seqlens", {0, 5, 17})) ==
        "bad_input: a.h5: cu_seqlens: expected to end at the number of positions, 18, found 17");
  CHECK_THAT(open_fault(with_integers("/cu_seqlens", {1, 18})),
             Contains("cu_seqlens: expected to start at 0, found 1"));
  CHECK_THAT(open_fault(with_integers("/cu_seqlens", {0})),
             Contains("cu_seqlens: expected 2 or more numbers, found 1"));
  CHECK_THAT(open_fault(with_integers("/cu_seqlens", {0, 13, 13, 18})),
             Contains("sequence 1 is empty or runs backwards: from 13 to 13"));
  CHECK_THAT(open_fault(with_integers("/cu_seqlens", {0, 14, 12, 18})),
             Contains("sequence 1 is empty or runs backwards"));
  CHECK_THAT(open_fault(with_integers("/cu_seqlens", {0, 18})),
             Contains("positions: token 13 of sequence 0: expected more than 12, found 0"));
  std::vector<std::int64_t> positions(18, 0);
  for (std::size_t t = 0; t < 18; ++t) positions[t] = static_cast<std::int64_t>(t) - 1;
  CHECK_THAT(open_fault(with_integers("/positions", positions)),
             Contains("positions: token 0 of sequence 0: expected more than -1, found -1"));
  CHECK_THAT(open_fault([](hid_t file) {
               const std::vector<std::uint8_t> flags(18, 2);
               set_dataset(file, "/generated", H5T_STD_U8LE, {18}, flags.data());
             }),
             Contains("generated: token 0: expected 0 or 1, found 2"));
  CHECK_THAT(open_fault([](hid_t file) {
               const std::vector<std::uint8_t> flags(17, 1);
               set_dataset(file, "/generated", H5T_STD_U8LE, {17}, flags.data());
             }),
             Contains("generated: expected 18 flags, found 17"));
  CHECK_THAT(open_fault([](hid_t file) {
               const std::vector<std::int32_t> small(18, 1);
               set_dataset(file, "/positions", H5T_STD_I32LE, {18}, small.data());
             }),
             Contains("positions: expected int64, found int32"));
}

TEST_CASE("Shapes that disagree are refused with both shapes", "[dump]") {
  const std::vector<float> zeros(10'000, 0.0f);
  const auto with_shape = [&](const std::string& name, const std::vector<hsize_t>& shape) {
    return open_fault([&](hid_t file) {
      set_dataset(file, "/layers/0/" + name, H5T_IEEE_F32LE, shape, zeros.data());
      set_attribute(file, "/layers/0/" + name, "kvq_dtype", "float32");
    });
  };
  CHECK(with_shape("q", {18, 4, 7}) == "bad_input: a.h5: layer 0: q: expected shape [18, 4, 8], found [18, 4, 7]");
  CHECK(with_shape("k", {17, 2, 8}) == "bad_input: a.h5: layer 0: k: expected shape [18, 2, 8], found [17, 2, 8]");
  CHECK(with_shape("v", {18, 12}) == "bad_input: a.h5: layer 0: v: expected shape [18, 2, 6], found [18, 12]");
  CHECK_THAT(with_shape("o_proj_metric", {4, 6, 6}),
             Contains("o_proj_metric: expected shape [2, 6, 6], found [4, 6, 6]"));
  CHECK_THAT(with_shape("o_proj_metric", {2, 36}), Contains("o_proj_metric: expected shape [2, 6, 6], found [2, 36]"));
  CHECK_THAT(with_shape("output_curvature", {4, 6, 5}), Contains("expected shape [4, 6, 6], found [4, 6, 5]"));
  CHECK_THAT(with_shape("o_proj", {3, 24}), Contains("o_proj: expected float16, found float32"));
  CHECK_THAT(with_shape("rope_inv_freq", {4}), Contains("rope_inv_freq: expected float64, found float32"));
  CHECK_THAT(open_fault([](hid_t file) {
               const double three[] = {1, 2, 3};
               set_dataset(file, "/layers/0/rope_inv_freq", H5T_IEEE_F64LE, {3}, three);
             }),
             Contains("rope_inv_freq: expected shape [4], found [3]"));
  CHECK_THAT(open_fault([](hid_t file) {
               const double bad[] = {1, 2, -3, 4};
               set_dataset(file, "/layers/0/rope_inv_freq", H5T_IEEE_F64LE, {4}, bad);
             }),
             Contains("rope_inv_freq: pair 2: expected a frequency that is not negative, found -3"));
}

TEST_CASE("Layer names that are not canonical numbers of this model are refused, other names ignored", "[dump]") {
  const auto with_group = [](const std::string& name) {
    return open_fault([&](hid_t file) {
      H5Gclose(H5Gcreate2(file, ("/layers/" + name).c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    });
  };
  CHECK(with_group("notes") == "no error");
  CHECK_THAT(with_group("1"), Contains("layers: expected layers from 0 to 0 without leading zeros, found '1'"));
  CHECK_THAT(with_group("00"), Contains("found '00'"));
  CHECK_THAT(with_group("99999999999999999999"), Contains("found '99999999999999999999'"));
  CHECK_THAT(open_fault([](hid_t file) { remove_link(file, "/layers/0"); }), Contains("layers: holds no layer"));
}

TEST_CASE("Declared data that is not in the file is refused before anything is allocated", "[dump]") {
  rlimit old{};
  ::getrlimit(RLIMIT_AS, &old);
  const std::string huge = open_fault(with_empty_q(H5T_IEEE_F32LE, {hsize_t{1} << 40, 4, 8}));
  CHECK_THAT(huge, Contains("layer 0: q: expected 140737488355328 bytes of data, but the file does not hold them"));
  CHECK_THAT(open_fault(with_empty_q(H5T_IEEE_F32LE, {hsize_t{1} << 40, hsize_t{1} << 20, 1 << 10})),
             Contains("q: its size overflows"));
  CHECK_THAT(open_fault(with_empty_q(H5T_IEEE_F32LE, {18, 4, 8})),
             Contains("the file does not hold them (never written, or cut off)"));
  const auto chunked = [](hid_t creation) {
    const hsize_t chunk[] = {18, 4, 8};
    H5Pset_chunk(creation, 3, chunk);
  };
  CHECK_THAT(open_fault(with_empty_q(H5T_IEEE_F32LE, {18, 4, 8}, chunked)), Contains("the file does not hold them"));
}

TEST_CASE("Storage that is not plain is refused", "[dump]") {
  const TempFolder outside;
  const auto deflate = [](hid_t creation) {
    const hsize_t chunk[] = {18, 4, 8};
    H5Pset_chunk(creation, 3, chunk);
    H5Pset_deflate(creation, 1);
  };
  CHECK_THAT(open_fault(with_empty_q(H5T_IEEE_F32LE, {18, 4, 8}, deflate)),
             Contains("unsupported: a.h5: layer 0: q: is compressed or filtered"));
  const auto external = [&](hid_t creation) { H5Pset_external(creation, (outside / "raw").c_str(), 0, H5F_UNLIMITED); };
  CHECK_THAT(open_fault(with_empty_q(H5T_IEEE_F32LE, {18, 4, 8}, external)), Contains("q: is stored in other files"));
  const auto compact = [](hid_t creation) { H5Pset_layout(creation, H5D_COMPACT); };
  CHECK_THAT(open_fault(with_empty_q(H5T_IEEE_F32LE, {18, 4, 8}, compact)), Contains("q: is compact or virtual"));
  const auto virtual_source = [&](hid_t creation) {
    const hsize_t shape[] = {18, 4, 8};
    const hid_t space = H5Screate_simple(3, shape, nullptr);
    H5Pset_virtual(creation, space, (outside / "other.h5").c_str(), "/q", space);
    H5Sclose(space);
  };
  CHECK_THAT(open_fault(with_empty_q(H5T_IEEE_F32LE, {18, 4, 8}, virtual_source)),
             Contains("q: is compact or virtual"));
  CHECK_THAT(open_fault(with_empty_q(H5T_IEEE_F32BE, {18, 4, 8})), Contains("q: "));
}

TEST_CASE("Links that lead elsewhere are refused", "[dump]") {
  const auto relink = [](const std::string& path, const auto& make) {
    return open_fault([&](hid_t file) {
      H5Lmove(file, path.c_str(), file, "/moved", H5P_DEFAULT, H5P_DEFAULT);
      make(file, path.c_str());
    });
  };
  const auto soft = [](hid_t file, const char* path) {
    H5Lcreate_soft("/moved", file, path, H5P_DEFAULT, H5P_DEFAULT);
  };
  const auto external = [](hid_t file, const char* path) {
    H5Lcreate_external("a.h5", "/moved", file, path, H5P_DEFAULT, H5P_DEFAULT);
  };
  for (const char* path : {"/layers", "/layers/0", "/layers/0/q", "/cu_seqlens"}) {
    CHECK_THAT(relink(path, soft), Contains("is a soft or external link"));
    CHECK_THAT(relink(path, external), Contains("is a soft or external link"));
  }
}

TEST_CASE("A dataset in the place of a group and the reverse are refused", "[dump]") {
  CHECK_THAT(open_fault([](hid_t file) {
               remove_link(file, "/layers/0/q");
               H5Gclose(H5Gcreate2(file, "/layers/0/q", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
             }),
             Contains("layer 0: q: cannot be opened as a dataset"));
  CHECK_THAT(open_fault(with_integers("/layers/0", {1})), Contains("layer 0: cannot be opened as a group"));
}

TEST_CASE("The first NaN or infinity is named by file, layer, tensor and index", "[dump]") {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const float bad :
         {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), std::nanf("")}) {
      DumpContent content = random_dump({.lengths = {500}, .dtype = dtype});
      // Narrowing saturates, so an infinity is put in as NaN there.
      const float value = dtype == DType::f32 ? bad : std::nanf("");
      content.layers[0].k[(321 * 2 + 1) * 8 + 5] = value;
      content.layers[0].k[(400 * 2 + 1) * 8 + 5] = value;
      CHECK(load_fault(content) == "numerical: a.h5: layer 0: k: NaN or infinity at [321, 1, 5]");
    }
  }
}

TEST_CASE("A tensor of zeros, signed or not, is refused", "[dump]") {
  DumpContent content = random_dump({.dtype = DType::bf16});
  content.layers[0].v.assign(content.layers[0].v.size(), -0.0f);
  CHECK(load_fault(content) == "numerical: a.h5: layer 0: v: all numbers are zero");
  content.layers[0].v.back() = 1e-30f;
  CHECK(load_fault(content) == "no error");
}

TEST_CASE("A metric of the output projection that is none is refused, with the place", "[dump]") {
  const auto fault = [](std::size_t index, float value) {
    DumpContent content = random_dump({});
    std::vector<float>& metric = content.layers[0].o_proj_metric;
    metric.assign(2 * 6 * 6, 0.0f);
    for (std::size_t i = 0; i < 6; ++i) metric[i * 7] = 8.0f, metric[36 + i * 7] = 1e-3f;
    metric[index] = value;
    return load_fault(content);
  };
  constexpr std::size_t kOff = 36 + 3 * 6 + 2;  // head 1, row 3, column 2
  CHECK(fault(0, 8.0f) == "no error");
  CHECK(fault(36 + 7, 0.0f) == "no error");
  CHECK(fault(kOff, 0.9e-8f) == "no error");
  // 1e-5 of the head's own largest element, not of the other's.
  CHECK(fault(kOff, 1.1e-8f) ==
        "bad_input: a.h5: layer 0: o_proj_metric: 1.1e-08 at [1, 3, 2], 0 at [1, 2, 3]: expected a symmetric matrix");
  CHECK_THAT(fault(2 * 6 + 3, 1e-4f), Contains("0 at [0, 3, 2], 0.0001 at [0, 2, 3]: expected a symmetric matrix"));
  CHECK(fault(36 + 14, -1e-9f) ==
        "bad_input: a.h5: layer 0: o_proj_metric: -1e-09 at [1, 2, 2]: expected a diagonal that is not negative");
  CHECK(fault(kOff, std::nanf("")) == "numerical: a.h5: layer 0: o_proj_metric: NaN or infinity at [1, 3, 2]");
  CHECK(fault(0, std::numeric_limits<float>::infinity()) ==
        "numerical: a.h5: layer 0: o_proj_metric: NaN or infinity at [0, 0, 0]");
  DumpContent zeros = random_dump({});
  zeros.layers[0].o_proj_metric.assign(2 * 6 * 6, 0.0f);
  CHECK(load_fault(zeros) == "numerical: a.h5: layer 0: o_proj_metric: all numbers are zero");
}

TEST_CASE("Matrices that are no second moments are refused when the dump is opened", "[dump]") {
  const auto fault = [](float off_diagonal, bool curvature) {
    DumpContent content = random_dump({});
    DumpLayer& layer = content.layers[0];
    std::vector<float>& matrices = curvature ? layer.output_curvature : layer.o_proj_metric;
    matrices.assign((curvature ? 4 : 2) * 6 * 6, 0.0f);
    for (std::size_t head = 0; head < matrices.size(); head += 36)
      for (std::size_t i = 0; i < 6; ++i) matrices[head + 7 * i] = 1.0f;
    matrices[36 + 1] = matrices[36 + 6] = off_diagonal;
    const TempFolder folder;
    write_dump(folder / "a.h5", content);
    return error_text([&] { Dump::open({folder / "a.h5"}); });
  };
  CHECK(fault(1.0f, true) == "no error");
  CHECK(fault(1.00001f, true) == "no error");  // rounding of a matrix of rank 1
  CHECK_THAT(fault(1.1f, true),
             Contains("a.h5: layer 0: output_curvature: head 1: expected a second moment, found a matrix with an "
                      "eigenvalue below -0.0001"));
  CHECK_THAT(fault(-1.1f, false), Contains("layer 0: o_proj_metric: head 1: expected a second moment"));
}

TEST_CASE("Everything that statistics would refuse later is refused when the dump is opened", "[dump]") {
  CHECK_THAT(open_fault(with_attribute("/", "model_config", std::string("not JSON"))),
             Contains("a.h5: attribute model_config: not valid JSON"));
  CHECK_THAT(open_fault(with_attribute("/", "model_config", std::string("[1]"))),
             Contains("attribute model_config: expected a JSON object, found array"));
  CHECK_THAT(open_fault(with_attribute("/layers/0", "num_q_heads", std::int64_t{4098})),
             Contains("layer 0: num_q_heads: expected 1 to 4096, found 4098"));
  const double frequencies[] = {1.0, 0.1, 1e300, 0.001};
  CHECK_THAT(
      open_fault([&](hid_t file) { set_dataset(file, "/layers/0/rope_inv_freq", H5T_IEEE_F64LE, {4}, frequencies); }),
      Contains("layer 0: rope_inv_freq: pair 2: expected angles up to 9.0072e+15, found 1.2e+301 at position 12"));
}

TEST_CASE("A sparse file that claims more than it stores is refused, by dataset", "[dump]") {
  const auto never_written = [](hid_t creation) {
    H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY);
    H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER);
  };
  CHECK_THAT(open_fault(with_empty_q(H5T_IEEE_F32LE, {hsize_t{1} << 22, 4, 8}, never_written)),
             Contains("layer 0: q: expected 536870912 bytes of data, found ") && Contains("(a sparse file)"));
  const auto chunked = [&](hid_t creation) {
    const hsize_t chunk[] = {hsize_t{1} << 20, 4, 8};
    H5Pset_chunk(creation, 3, chunk);
    never_written(creation);
  };
  CHECK_THAT(open_fault(with_empty_q(H5T_IEEE_F32LE, {hsize_t{1} << 22, 4, 8}, chunked)),
             Contains("layer 0: q: expected 536870912 bytes of data, found ") && Contains("(a sparse file)"));
}

TEST_CASE("A metric of the output projection is float32", "[dump]") {
  const std::vector<double> wide(2 * 6 * 6, 1.0);
  CHECK_THAT(open_fault([&](hid_t file) {
               set_dataset(file, "/layers/0/o_proj_metric", H5T_IEEE_F64LE, {2, 6, 6}, wide.data());
             }),
             Contains("o_proj_metric: expected float32, found float64"));
}

TEST_CASE("A layer that is not there is refused", "[dump]") {
  const TempFolder folder;
  write_dump(folder / "a.h5", random_dump({}));
  const auto dump = Dump::open({folder / "a.h5"});
  CHECK_THAT(error_text([&] { dump.load_layer(1); }),
             Contains("bad_input:") && Contains("there is no layer 1 in the dump"));
}
