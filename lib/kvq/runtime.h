/**
 * kvq runtime: low-bit paged KV caches for a serving engine. C interface, C99 and C++.
 *
 * In the life of an engine:
 *
 *     kvq_model_load          artifact + what the engine believes its model is -> host plan of one rank
 *     kvq_model_upload        rotations and centers into the engine's memory, once for each device
 *     kvq_selftest            golden rows of the artifact, on this device
 *     kvq_cache_create        where the engine keeps each layer's pages, sinks and rings
 *     kvq_plan_create         the kernels of all layers, once for each set of sizes
 *     each step:              kvq_step_run, then for each layer kvq_append_run, or kvq_write_run and kvq_prefill_run
 *     now and then:           kvq_fault_query
 *
 * The cache. Every token is quantized into its page when it is written; a page is valid for all who hold it as soon as
 * the write has run. Beside the pages, exact (bfloat16, not quantized) rows of the first and the last tokens of a
 * sequence are kept: the first sink_tokens in a sink slot, whose rows do not change once they are written, so that
 * sequences may share it; the last ones in a ring slot of the sequence's own. Attention takes the exact row of
 *
 *     position p < sink_tokens, if the sequence has a sink slot
 *     position p >= max(T - recent_tokens, exact_from), if the sequence has a ring slot
 *
 * where T is the sequence's length and exact_from the first position whose exact row the ring holds: 0 for a sequence
 * that began with an empty ring, the length of the hit after a hit in a prefix cache. All other tokens are read from
 * pages. A hit shorter than sink_tokens needs a sink slot of its own with the rows of the hit copied into it
 * (kvq_copy_run), or none.
 *
 * Order. kvq_step_run comes before the step's writes and attention. To take back the last tokens of a sequence
 * (speculative decoding), pass a smaller length in the next step; the ring holds exact rows for max_step_tokens more
 * tokens than are recent. A chunk of a prompt may attend before it is written (prefix_lens null, seq_lens without the
 * chunk): then its first queries see the exact rows of the recent tokens before the chunk. If the chunk is written
 * first, those tokens may have left the ring, and are read from pages.
 *
 * Faults. What only the device can see (a length beyond the page table, a page or slot beyond its pool, a ring that
 * belongs to another sequence, more tokens taken back than the ring holds, ...) is checked on the device: nothing is
 * read or written out of bounds, the sequence's results are NaN, and kvq_fault_query tells the first fault. Keys and
 * values that are NaN or infinite are stored as NaN, and queries that are make results NaN, so that such results are
 * NaN, too.
 *
 * Ownership. The caller owns every byte of device memory, every stream and every page table; the library owns its
 * handles. `create`, `load` and `upload` may allocate on the host and may wait for the device. `run` does neither, and
 * can be captured in a CUDA graph, because kernels read everything that changes from step to step (lengths, page
 * tables, slots) on the device. Handles may be destroyed in any order, and while kernels of their calls still run: what
 * a handle needs of another one it copies, or shares and counts. The device memory that the caller gave must outlive
 * the kernels.
 *
 * Threads and devices. There is no global state. Handles do not change after they are made, so threads may share them.
 * A call works on the CUDA device that is current in its thread, and `stream` must belong to that device. Device
 * models, caches and plans belong to the device that was current when they were made; calls refuse them if another
 * device is current. Kernels are loaded when plans and caches are made, not by the first run. Calls that may run at the
 * same time need workspaces of their own.
 *
 * Streams. Kernels of write and decode use programmatic dependent launch: they may start while the stream's kernel
 * before them ends, and let the next kernel start while they end; each waits for the kernels before it. If the caller
 * launches a kernel of its own among them with programmatic stream serialization, this kernel must wait for the kernel
 * before it (griddepcontrol.wait) even if it needs no results of it, because the kernels behind it rely on that. The
 * data that a call reads must not change until its kernels have ended.
 *
 * Structures begin with `struct_size`. KVQ_INIT(object) zeroes a structure and sets that field; zero is the default of
 * every other field. The library accepts structures of older callers, and of newer callers if the fields that it does
 * not know are zero.
 *
 * Errors. Functions return KVQ_OK or a code; if `error` is not null its message says what was expected, found and
 * supported, in one line. Unless the code is KVQ_CUDA, nothing was launched and outputs are untouched. No exception
 * leaves the library.
 *
 * Formats. Every format of formats/pages.md is supported with a head_dim that is a multiple of 8, up to 256; dense
 * rotations need a head_dim that is a multiple of 32. The formats of variants.json have tuned kernels, compiled for one
 * format; all others run on generic kernels, which read the format at run time and are slower. kvq_kernel_info tells
 * which kernel a plan uses.
 *
 * Letters in shapes: B sequences of a batch, T tokens of a call, Hq query heads, Hkv KV heads (both of this rank), D
 * head_dim: of queries and keys; of values and results D is v_head_dim, which may differ.
 */
#ifndef KVQ_RUNTIME_H
#define KVQ_RUNTIME_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KVQ_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version, status, errors ---- */

/** Version of this header: 100 * major + minor. The major number changes if older callers break. */
#define KVQ_ABI_VERSION 301

typedef struct kvq_version_info {
  int32_t abi_version; /**< of the library */
  const char* text;    /**< of the program, "0.2.0" */
} kvq_version_info;

/** Version of the library that was loaded; works without a device. Never null. */
KVQ_API const kvq_version_info* kvq_version(void);

typedef enum kvq_status {
  KVQ_OK = 0,
  KVQ_INVALID_ARGUMENT = 1, /**< a size, pointer or stride that cannot be */
  KVQ_UNSUPPORTED = 2,      /**< sound, but not built or not possible on this device */
  KVQ_MISMATCH = 3,         /**< an artifact that does not fit the model, or golden rows that come out differently */
  KVQ_IO = 4,               /**< a file that cannot be read, or is malformed */
  KVQ_CUDA = 5,             /**< the CUDA runtime refused; the message holds its reason */
  KVQ_INTERNAL = 6          /**< a bug in kvq, or no host memory */
} kvq_status;

/** Name of a kvq_status, such as "unsupported"; "unknown status" for other numbers. Never null. */
KVQ_API const char* kvq_status_string(int32_t status);

typedef struct kvq_error {
  size_t struct_size;
  char message[1024]; /**< empty after success, cut if it is longer */
} kvq_error;

#define KVQ_INIT(object) (memset(&(object), 0, sizeof(object)), (void)((object).struct_size = sizeof(object)))

/** A cudaStream_t. */
typedef struct CUstream_st* kvq_stream;

/** 16-bit type that a model computes in: queries, keys, values, results. */
typedef enum kvq_activation { KVQ_BF16 = 0, KVQ_FP16 = 1 } kvq_activation;

typedef enum kvq_kernel {
  KVQ_KERNEL_DECODE = 0,
  KVQ_KERNEL_WRITE = 1,
  KVQ_KERNEL_DEQUANTIZE = 2,
  KVQ_KERNEL_PREFILL = 3
} kvq_kernel;

/** Name of the i-th tuned variant of a kvq_kernel that was built, or null behind the last one.
 * "decode_d128_u2g128_u2g128_h4_bf16": head_dim 128; keys, then values, in affine 2-bit codes with groups of 128 (s =
 * symmetric, a trailing b = scales and minima in bf16, bf16 = exact); at most 4 query heads of a KV head; bf16
 * activations. */
KVQ_API const char* kvq_kernel_name(int32_t kernel, int32_t index);

/** A kernel that a plan uses: kvq_plan_kernel(). */
typedef struct kvq_kernel_info {
  size_t struct_size;
  const char* name; /**< as kvq_kernel_name(), or "decode_generic_bf16" and the like; lives as long as the library */
  int32_t tuned;    /**< 1: compiled for this format; 0: generic */
} kvq_kernel_info;

/* ---- Serving: which kernels the layers of an artifact get. Needs no device ---- */

typedef enum kvq_served { KVQ_NOT_SERVED = 0, KVQ_SERVED_GENERIC = 1, KVQ_SERVED_TUNED = 2 } kvq_served;

typedef struct kvq_layer_serving {
  size_t struct_size;
  int32_t layer;
  int32_t served;     /**< kvq_served: the kernel of decode */
  int32_t kernels[4]; /**< kvq_served by kvq_kernel; of a served layer, prefill may have none */
  char format[40];    /**< keys and values in pages, "u2g128" or "u4g128/u2g128"; empty if the layer is not served */
  char message[256];  /**< why the layer is not served; else empty */
} kvq_layer_serving;

/**
 * Which kernels of this library serve the layers of an artifact: KVQ_OK, also if none does. `kvq-inspect` prints the
 * same for a library with all kernels.
 *
 * @param activation  kvq_activation of the model
 * @param layers      [capacity] results in order of layer, with struct_size set in the first; may be null with
 *                    capacity 0
 * @param count       result: number of the artifact's layers, also if it exceeds capacity; may be null
 */
KVQ_API kvq_status kvq_artifact_serving(const char* path, int32_t activation, kvq_layer_serving* layers,
                                        int32_t capacity, int32_t* count, kvq_error* error);

/* ---- Model: what an artifact says, for one rank ---- */

typedef enum kvq_rope { KVQ_ROPE_ANY = 0, KVQ_ROPE_NONE = 1, KVQ_ROPE_HALF = 2, KVQ_ROPE_INTERLEAVED = 3 } kvq_rope;

/** Rotations that are folded into the model's weights (kvq_fold_values): the runtime then applies neither these
 * rotations nor their centers.
 */
typedef enum kvq_fold {
  KVQ_FOLD_NONE = 0,
  KVQ_FOLD_V = 1,
  KVQ_FOLD_K = 2,
  KVQ_FOLD_K_SCALES =
      4 /**< only the channel scales of keys (kvq_fold_key_scales): the runtime applies rotation and center */
} kvq_fold;

/** What the engine believes one layer is: heads of the whole model, before any slicing. */
typedef struct kvq_layer_geometry {
  size_t struct_size;
  int32_t num_q_heads, num_kv_heads;
  int32_t head_dim;
  int32_t v_head_dim;     /**< 0: as head_dim */
  int32_t sliding_window; /**< keys that a query sees, itself included; 0: all */
  int32_t rope;           /**< kvq_rope; KVQ_ROPE_ANY is not compared */
  int32_t rotary_dim;     /**< 0: not compared */
  uint32_t fold;          /**< KVQ_FOLD_... of the weights that are served, or-ed */
  double softmax_scale;   /**< compared to 1e-6 of itself; 0: not compared */
  double logit_softcap;   /**< scores become softcap * tanh(score / softcap). Compared to 1e-6 of itself; 0: not
                               compared */
} kvq_layer_geometry;

typedef enum kvq_model_flags {
  /** Quantizes every token, without exact windows. For measurements only, because the windows are part of the
   * calibrated plan. */
  KVQ_MODEL_WITHOUT_WINDOWS = 1
} kvq_model_flags;

typedef struct kvq_model_options {
  size_t struct_size;
  int32_t num_layers;                 /**< of the whole model */
  int32_t num_geometries;             /**< 1: all layers are equal; else num_layers */
  const kvq_layer_geometry* geometry; /**< [num_geometries] */
  const char* fingerprint;            /**< SHA-256 of the model in hex; null: not compared */
  int32_t first_layer, layer_count;   /**< what this rank serves (pipeline parallel); count 0: up to the last one */
  int32_t tp_rank, tp_size;           /**< tensor parallel; size 0: 1 */
  int32_t activation;                 /**< kvq_activation */
  int32_t page_size;                  /**< tokens: 16, 32, 64 or 128; 0: 64 */
  int32_t max_step_tokens;            /**< most tokens of a sequence that are taken back at once (speculative decoding);
                                           sizes the windows; 0: 1 */
  uint32_t flags;                     /**< KVQ_MODEL_... */
} kvq_model_options;

typedef struct kvq_model kvq_model;

/**
 * Reads an artifact and keeps what one rank needs of it. On failure there is no model, and the message names all
 * faults: KVQ_MISMATCH if geometry, fingerprint or layers are not those of the artifact, KVQ_UNSUPPORTED for formats
 * that pages do not hold or no kernel takes, KVQ_IO for a file that is missing, malformed or of an unknown version.
 *
 * Tensor parallel rank r of n has the query heads [r Hq/n, (r+1) Hq/n) and their KV heads: Hkv/n of them if n divides
 * Hkv, or one, which n/Hkv ranks hold, if Hkv divides n.
 */
KVQ_API kvq_status kvq_model_load(const char* path, const kvq_model_options* options, kvq_model** model,
                                  kvq_error* error);
/** Null is allowed, as for all destroy functions. */
KVQ_API void kvq_model_destroy(kvq_model* model);

typedef struct kvq_model_info {
  size_t struct_size;
  int32_t num_layers, first_layer, layer_count;
  int32_t tp_rank, tp_size;
  int32_t activation; /**< kvq_activation */
  int32_t page_size, max_step_tokens;
  int32_t sink_tokens, recent_tokens; /**< exact tokens at both ends of every sequence */
  int32_t golden_layers;              /**< of this rank's layers, those with golden rows */
  const char* name;                   /**< of the model; lives as long as the handle */
  const char* method;                 /**< calibration method; lives as long as the handle */
  const char* content_hash;           /**< of the artifact: "xxh3-128:" and 32 hexadecimal digits, as kvq-inspect prints
                                           it; lives as long as the handle */
  uint64_t layout_id;                 /**< two models may exchange pages, sink slots and ring slots if, and only if,
                                           their numbers are equal. It covers the version of formats/pages.md, the
                                           content hash, page_size, exact windows (max_step_tokens as far as it sizes
                                           rings), and each layer's index, formats and KV heads */
} kvq_model_info;

/** @param info  with struct_size set */
KVQ_API kvq_status kvq_model_query(const kvq_model* model, kvq_model_info* info, kvq_error* error);

typedef enum kvq_rotation { KVQ_ROTATION_IDENTITY = 0, KVQ_ROTATION_HADAMARD = 1, KVQ_ROTATION_DENSE = 2 } kvq_rotation;

/** One layer as this rank holds it. */
typedef struct kvq_layer_info {
  size_t struct_size;
  int32_t layer;
  int32_t num_q_heads, num_kv_heads;   /**< of this rank */
  int32_t first_q_head, first_kv_head; /**< in the whole model */
  int32_t head_dim, v_head_dim;
  int32_t k_bits, v_bits;             /**< 2, 3, 4, or 16 for exact rows */
  int32_t k_group_size, v_group_size; /**< 0 for exact rows */
  int32_t k_numbers, v_numbers;       /**< numbers beside the codes of a group, of the artifact's scale type: 2 affine
                                           (scale and minimum or zero point), 1 symmetric (scale), 0 exact */
  int32_t k_rotation, v_rotation;     /**< kvq_rotation that the runtime applies: identity if folded. Dense ones need
                                           not be orthogonal */
  uint32_t fold;                      /**< as in kvq_layer_geometry */
  int32_t sliding_window;
  int32_t sink_rows, ring_rows; /**< rows of a sink slot, of a ring slot */
  int64_t page_bytes;           /**< of one page: page_size tokens of all KV heads of the rank, K and V */
  int64_t sink_slot_bytes;      /**< 0 without sink tokens */
  int64_t ring_slot_bytes;      /**< 0 without recent tokens */
  double softmax_scale;
  double k_effective_bits, v_effective_bits; /**< bits of an element, scales and minima included */
  int32_t k_scales, v_scales;                /**< 1: the runtime multiplies channels by scales, before k_rotation */
  double logit_softcap;                      /**< as in kvq_layer_geometry; 0: none */
} kvq_layer_info;

/** @param layer  index in the whole model */
KVQ_API kvq_status kvq_model_query_layer(const kvq_model* model, int32_t layer, kvq_layer_info* info, kvq_error* error);

/* ---- Folding: rotations into the model's weights, so that nothing has to be rotated while serving ---- */

/** Type that folded weights are stored in. */
typedef enum kvq_weight_type { KVQ_WEIGHT_BF16 = 0, KVQ_WEIGHT_FP16 = 1, KVQ_WEIGHT_FP32 = 2 } kvq_weight_type;

/** The projections of this rank's heads in host memory, in double, row-major [out, in] as PyTorch stores them; changed
 * in place, and rounded to the model's type by the caller afterwards. */
typedef struct kvq_fold_values_args {
  size_t struct_size;
  int32_t hidden;      /**< in_features of v_proj, out_features of o_proj */
  int32_t weight_type; /**< kvq_weight_type, for kvq_fold_error */
  double* v_weight;    /**< [Hkv D, hidden] */
  double* v_bias; /**< [Hkv D], or null if there is none. A center needs v_bias and o_bias; pass zeros if the model has
                       none */
  double* o_weight; /**< [hidden, Hq D] */
  double* o_bias;   /**< [hidden] or null; each rank adds its own, so a model's bias goes to one of them */
} kvq_fold_values_args;

/** Relative Frobenius norms of the errors of rounding to weight_type: of the folded weights, and of the given weights
 * (`before`). The price of folding is the difference. */
typedef struct kvq_fold_error {
  size_t struct_size;
  double v_proj, v_proj_before;
  double o_proj, o_proj_before;
} kvq_fold_error;

/**
 * Folds a layer's rotation A, orthogonal or not, and center of values: v_proj then gives (v - center) A, and o_proj,
 * its weights times A^-T, takes the attention output over these values. Exact in real arithmetic if attention weights
 * sum to 1 (with learned sinks and a center they do not). Serve the folded weights with KVQ_FOLD_V in the layer's
 * geometry and the same artifact. Host work, single-threaded. KVQ_UNSUPPORTED for a center without biases.
 * @param result  with struct_size set, or null
 */
KVQ_API kvq_status kvq_fold_values(const kvq_model* model, int32_t layer, const kvq_fold_values_args* args,
                                   kvq_fold_error* result, kvq_error* error);

/** As kvq_fold_values_args. */
typedef struct kvq_fold_keys_args {
  size_t struct_size;
  int32_t hidden;   /**< in_features of q_proj and k_proj */
  double* q_weight; /**< [Hq D, hidden] */
  double* q_bias;   /**< [Hq D] or null */
  double* k_weight; /**< [Hkv D, hidden] */
  double* k_bias;   /**< [Hkv D] or null; a center needs one */
} kvq_fold_keys_args;

/**
 * Folds a layer's rotation and center of keys, for KVQ_FOLD_K. KVQ_UNSUPPORTED for a layer with RoPE, because A is
 * applied after RoPE and does not commute with it. A norm between projection and attention (QK-norm) forbids this fold,
 * too; the caller must check that, because artifacts do not record such norms.
 */
KVQ_API kvq_status kvq_fold_keys(const kvq_model* model, int32_t layer, const kvq_fold_keys_args* args,
                                 kvq_error* error);

/** As kvq_fold_values_args. The projections of queries and keys, or the norms behind them. */
typedef struct kvq_fold_key_scales_args {
  size_t struct_size;
  int32_t hidden;   /**< in_features of q_proj and k_proj */
  double* q_weight; /**< [Hq D, hidden], or null with norms */
  double* q_bias;   /**< [Hq D] or null */
  double* k_weight; /**< [Hkv D, hidden], or null with norms */
  double* k_bias;   /**< [Hkv D] or null */
  double* q_norm; /**< [D] factors of channels in a norm of each head between q_proj and RoPE (1 + weight in models that
                       store it so), or null: no norm */
  double* k_norm; /**< [D] likewise */
} kvq_fold_key_scales_args;

/**
 * Folds the scales of a layer's keys, one for each channel, for KVQ_FOLD_K_SCALES: k_proj then gives k * scale and
 * q_proj gives q / scale, up to the rounding of the weights. The runtime still applies the rotation, and multiplies the
 * center by the scales. Layers with RoPE can be folded if the two channels of each rotary pair share a scale. With
 * norms between projections and RoPE (QK-norm) the norms take the scales, and the projections stay. Norms over all
 * heads at once have weights [Hkv D] and [Hq D]: pass them as projections with hidden 1. KVQ_UNSUPPORTED, naming
 * channels and heads, for keys without scales, for rotary pairs that differ, and for norms if KV heads of this rank
 * differ.
 */
KVQ_API kvq_status kvq_fold_key_scales(const kvq_model* model, int32_t layer, const kvq_fold_key_scales_args* args,
                                       kvq_error* error);

/* ---- Device model: rotations and centers on one device ---- */

/** Bytes that kvq_model_upload() needs; 0 if there is nothing to upload. */
KVQ_API kvq_status kvq_model_device_bytes(const kvq_model* model, size_t* bytes, kvq_error* error);

typedef struct kvq_device_model kvq_device_model;

/**
 * Copies rotations and centers to the current device, and waits for the copy.
 * @param memory  of the device, 256-byte aligned, at least kvq_model_device_bytes(); owned by the caller, must outlive
 * the handle and all caches that are made with it, and not change
 * @param model   may be destroyed afterwards
 */
KVQ_API kvq_status kvq_model_upload(const kvq_model* model, void* memory, size_t bytes, kvq_stream stream,
                                    kvq_device_model** device_model, kvq_error* error);
KVQ_API void kvq_device_model_destroy(kvq_device_model* device_model);

/* ---- Cache: where the caller keeps pages, sinks and rings ---- */

/** One layer's pools on the device. A sink slot or ring slot has the same number in all layers, a page in all layers of
 * its group. */
typedef struct kvq_layer_pools {
  size_t struct_size;
  void* pages;         /**< 16-byte aligned, [num_pages] page_stride apart. May be null for a layer whose sliding window
                            is at most recent_tokens, which then reads its ring alone: its calls get a page table of
                            negative numbers. The ring has the last recent_tokens of what is written: for n new tokens
                            of a sequence in one call that suffices if the window + n - 1 is at most recent_tokens.
                            Longer chunks must attend before they are written */
  int64_t page_stride; /**< bytes, a multiple of 16, below 2^32; 0: page_bytes */
  void* sinks;         /**< 16-byte aligned, [num_sink_slots] sink_slot_bytes apart; null without sink tokens */
  void* rings;         /**< 16-byte aligned, [num_ring_slots] ring_slot_bytes apart; null without recent tokens */
  int32_t group;       /**< layers that share page tables have one number, from 0 and below the number of layers: which
                            pages kvq_copy_run copies */
  int32_t num_pages;   /**< of this layer's group, at most num_pages of kvq_cache_options; 0: as many */
} kvq_layer_pools;

typedef enum kvq_cache_flags {
  /** Numbers of pages and slots and the owners of rings are not checked. For measurements: a wrong number then reads or
   * writes other memory. */
  KVQ_CACHE_UNCHECKED = 1
} kvq_cache_flags;

/** Sizes of the pools, equal in all layers unless kvq_layer_pools says otherwise. */
typedef struct kvq_cache_options {
  size_t struct_size;
  int32_t num_pages;      /**< of the largest pool, at least 1; kvq_step_run checks page tables against it */
  int32_t num_sink_slots; /**< 0 without sink tokens */
  int32_t num_ring_slots; /**< 0 without recent tokens */
  uint32_t flags;         /**< KVQ_CACHE_... */
} kvq_cache_options;

typedef struct kvq_cache kvq_cache;

/** Bytes of device memory that kvq_cache_create() needs. */
KVQ_API kvq_status kvq_cache_device_bytes(const kvq_device_model* device_model, const kvq_cache_options* options,
                                          size_t* bytes, kvq_error* error);

/**
 * Binds pools to a device model. Reads no byte of them: their contents before the first write do not matter.
 * @param pools   [count], one for each layer of the model, in order
 * @param memory  of the device, 256-byte aligned; owned by the caller, must outlive the handle; the library writes it.
 * The call waits until it is filled
 * @param device_model  may be destroyed afterwards
 */
KVQ_API kvq_status kvq_cache_create(const kvq_device_model* device_model, const kvq_cache_options* options,
                                    const kvq_layer_pools* pools, int32_t count, void* memory, size_t bytes,
                                    kvq_stream stream, kvq_cache** cache, kvq_error* error);
KVQ_API void kvq_cache_destroy(kvq_cache* cache);

/* ---- Sequences: what all calls of a step read ---- */

/** The sequences of a call: arrays in device memory, of B entries unless said otherwise. One structure serves the step
 * and all layers' calls; or one for each group of layers, if groups have page tables of their own (sliding windows
 * beside full attention): then call kvq_step_run once for each group, which gives its slot_mapping and changes nothing
 * else a second time. Either groups have pools of their own, named in kvq_layer_pools; or no two groups have a page of
 * the same number, and layers of different groups may share the memory of their pages. */
typedef struct kvq_sequences {
  size_t struct_size;
  int32_t batch;                /**< B */
  const int32_t* seq_lens;      /**< tokens of each sequence in the cache, new ones of this step included */
  const int32_t* page_table;    /**< [B, page_table_stride], or with page_indptr one list of all sequences' pages.
                                     Negative: no page; new tokens in it are not coded, and no call may read it */
  const int32_t* page_indptr;   /**< [B + 1] where each sequence's pages begin in the list, or null */
  int64_t page_table_stride;    /**< entries of a row of the table, at least 1; with page_indptr: of the whole list */
  const int32_t* sink_slots;    /**< sink slot of each sequence, -1: none; null without sink tokens */
  const int32_t* ring_slots;    /**< ring slot of each sequence, -1: none; null without recent tokens */
  const int32_t* exact_from;    /**< first position whose exact row the sequence's ring holds; null: 0 for all */
  const uint64_t* sequence_ids; /**< a number of each sequence that no other sequence has while its ring is in use;
                                   null: owners of rings are not checked */
} kvq_sequences;

/* ---- Step: where new tokens go ---- */

/** All pointers but `sequences` are to device memory. */
typedef struct kvq_step_args {
  size_t struct_size;
  const kvq_sequences* sequences; /**< lengths after the step */
  int32_t num_tokens; /**< T rows of the step's keys and values; rows behind the last sequence's are padding and are not
                           stored */
  const int32_t* token_indptr; /**< [B + 1] ascending: rows of each sequence's new tokens, which are its last tokens */
  int64_t* slot_mapping;       /**< result [T] page * page_size + slot of each token, or -1 */
  int64_t* window_mapping;     /**< result [T] for kvq_write_run: where exact rows go, or -1; null without windows */
} kvq_step_args;

/** Enqueues the beginning of a step, for all layers: computes both mappings and notes which sequences own which rings.
 * One step at a time may use a ring. */
KVQ_API kvq_status kvq_step_run(const kvq_cache* cache, const kvq_step_args* args, kvq_stream stream, kvq_error* error);

/* ---- Faults ---- */

typedef enum kvq_fault_code {
  KVQ_FAULT_NONE = 0,
  KVQ_FAULT_LENGTH = 1,       /**< a length below 0 or beyond the sequence's page table; value: the length */
  KVQ_FAULT_PAGE = 2,         /**< a page number beyond the pool; value: the number */
  KVQ_FAULT_SINK_SLOT = 3,    /**< a sink slot beyond the pool; value: the slot */
  KVQ_FAULT_RING_SLOT = 4,    /**< a ring slot beyond the pool; value: the slot */
  KVQ_FAULT_FOREIGN_RING = 5, /**< the ring belongs to another sequence_id; value: the slot */
  KVQ_FAULT_ROLLBACK = 6,     /**< more tokens were taken back than the ring holds rows of; value: the ring slot */
  KVQ_FAULT_NEW_TOKENS = 7, /**< token_indptr or q_indptr descends, or has more tokens than the call or the sequence */
  KVQ_FAULT_PREFIX = 8,     /**< prefix_lens below 0 or above seq_lens; value: the prefix */
  KVQ_FAULT_PLAN = 9,       /**< a chunk or its keys beyond the plan's sizes of prefill; value: the keys */
  KVQ_FAULT_SLOT_MAPPING = 10, /**< a slot of slot_mapping beyond the pool; value: the slot */
  KVQ_FAULT_WINDOW_ROW = 11,   /**< a row of window_mapping beyond the pools; value: the row */
  KVQ_FAULT_OUTPUT_ROWS = 12   /**< out_indptr has fewer rows than are asked for; value: the rows */
} kvq_fault_code;

/** Name of a kvq_fault_code, such as "page"; "unknown fault" for other numbers. Never null. */
KVQ_API const char* kvq_fault_string(int32_t code);

typedef struct kvq_fault {
  size_t struct_size;
  int32_t code;     /**< kvq_fault_code */
  int32_t sequence; /**< index in the batch of the call, or -1 */
  int32_t layer;    /**< index in the whole model, or -1: of a step */
  int64_t value;    /**< what was found */
} kvq_fault;

/** The first fault of all calls on this cache since the last query. Waits for the stream.
 * @param fault  with struct_size set */
KVQ_API kvq_status kvq_fault_query(const kvq_cache* cache, kvq_fault* fault, kvq_stream stream, kvq_error* error);

/* ---- Copy: pages, sinks and rings of all layers in one launch ---- */

typedef enum kvq_copy_kind { KVQ_COPY_PAGES = 0, KVQ_COPY_SINKS = 1, KVQ_COPY_RINGS = 2 } kvq_copy_kind;

/** Copies between entries (pages, sink slots or ring slots) of the pools, or between them and a buffer that holds whole
 * entries one after the other, for offload and restore. Numbers below 0 are skipped; numbers beyond the pool are
 * faults. All pointers are to memory that the device can access; the buffer may be pinned host memory. */
typedef struct kvq_copy_args {
  size_t struct_size;
  int32_t kind;        /**< kvq_copy_kind */
  int32_t count;       /**< N entries; 0 does nothing */
  const int32_t* from; /**< [N] entries that are read; null: the buffer */
  const int32_t* to;   /**< [N] entries that are written, different from each other and from `from`; null: the buffer */
  void* buffer;        /**< [N] kvq_copy_bytes() each, 16-byte aligned; null if neither `from` nor `to` is */
  const uint64_t* sequence_ids; /**< [N] of rings: the new owners; null: as before */
  int32_t group;                /**< of pages: copies those of the layers that have this group in kvq_layer_pools */
} kvq_copy_args;

/** Bytes of one entry in a buffer: all layers, and of rings the owner. Of pages: of group 0. A page of another group
 * takes page_bytes of each of its layers that has pages, in order. */
KVQ_API kvq_status kvq_copy_bytes(const kvq_cache* cache, int32_t kind, size_t* bytes, kvq_error* error);

KVQ_API kvq_status kvq_copy_run(const kvq_cache* cache, const kvq_copy_args* args, kvq_stream stream, kvq_error* error);

/* ---- Plan: the kernels of all layers ---- */

typedef enum kvq_plan_flags {
  /** Kernels of writes and decode start when the stream's kernel before them has ended: no programmatic dependent
   * launch. */
  KVQ_PLAN_NO_OVERLAP = 1
} kvq_plan_flags;

/** Sizes of the calls that a plan serves. Write and dequantize calls may have any. */
typedef struct kvq_plan_options {
  size_t struct_size;
  uint32_t flags;                 /**< KVQ_PLAN_... */
  int32_t max_batch;              /**< decode: most sequences of a call; 0: no decode */
  int32_t max_prefill_batch;      /**< prefill: most sequences of a call; 0: no prefill */
  int32_t max_prefill_queries;    /**< prefill: most new tokens of a sequence, at least 1 */
  int32_t max_prefill_keys;       /**< prefill: most tokens of a sequence, the new ones included; not less than
                                       max_prefill_queries */
  size_t prefill_workspace_bytes; /**< limit of prefill's workspace, kept as far as possible: sequences are then
                                       processed one after the other; 0: room for all at once */
  int32_t max_new_tokens;         /**< decode: most new tokens of a sequence, up to 16; 0: 1. A plan for several serves
                                       calls with one each, too, but slower than a plan for one: kernels attend for as
                                       many rows (new tokens times query heads of a KV head) as the plan asks for, up to
                                       16 at once */
  int32_t max_write_tokens;       /**< write: tokens of a call that its workspace should have room for; 0: no workspace.
                                       Calls may have more tokens, and may come without workspace */
} kvq_plan_options;

typedef struct kvq_plan kvq_plan;

/** Finds the kernels for all layers of a model, once for each format and head count, and asks the current device how
 * many blocks it runs. The plan serves every cache on this device whose layers have the same formats and heads as the
 * model's. KVQ_UNSUPPORTED, naming the layer, for a head_dim that no kernel supports, and with prefill for more than 16
 * query heads of a KV head.
 * @param model    may be destroyed afterwards
 * @param options  null: defaults, which serve writes and dequantization */
KVQ_API kvq_status kvq_plan_create(const kvq_model* model, const kvq_plan_options* options, kvq_plan** plan,
                                   kvq_error* error);
KVQ_API void kvq_plan_destroy(kvq_plan* plan);

/** The kernel of a layer. If that of prefill is tuned, cached tokens are dequantized by the dequantize kernel.
 * @param layer   index in the whole model
 * @param kernel  kvq_kernel
 * @param info    with struct_size set */
KVQ_API kvq_status kvq_plan_kernel(const kvq_plan* plan, int32_t layer, int32_t kernel, kvq_kernel_info* info,
                                   kvq_error* error);

/** Bytes of workspace that suffice for the calls of all layers; 0 for kernels without one (dequantize). A workspace
 * needs no initialization and holds nothing between calls. So consecutive calls of any layers, kernels and plans may
 * share one workspace that is large enough for each of them; concurrent calls may not.
 * Writes use a workspace for rows of trellis codes only, and do not need it: with fewer bytes than told, a call takes
 * its tokens in several rounds; with none, it takes a kernel that needs several times as long for many tokens.
 * @param kernel  kvq_kernel */
KVQ_API kvq_status kvq_plan_workspace_bytes(const kvq_plan* plan, int32_t kernel, size_t* bytes, kvq_error* error);

/* ---- Memory: what all this takes, before any of it is allocated ---- */

typedef struct kvq_memory_options {
  size_t struct_size;
  int32_t batch;           /**< sequences that exist at once, each with pages and slots of its own; at least 1 */
  int32_t length;          /**< tokens of each sequence, at least 1 */
  int32_t num_sink_slots;  /**< 0: batch */
  int32_t multiprocessors; /**< with plan_options: the most that the device may have; 0: 256 */
  const kvq_plan_options* plan_options; /**< bounds the workspaces without a device; null: no workspaces */
  const kvq_plan* plan; /**< of the model: its workspaces, exactly; then plan_options must be null. Or null */
  /** [layers of this rank] Most consecutive tokens of a sequence whose pages a layer keeps at once: at least its
   * sliding window, or `length`. 0: it keeps none, because its window is at most recent_tokens. Whoever frees pages
   * behind a window W, in steps of up to n new tokens of a sequence, keeps W + max(n, max_step_tokens). Null: `length`
   * in all. */
  const int32_t* page_tokens;
} kvq_memory_options;

/** Bytes of device memory, for all layers of this rank together. All are exact but decode_workspace_bytes without a
 * plan, which is an upper bound for devices with at most `multiprocessors`, each with at most 228 KiB of shared memory
 * and 2048 threads. */
typedef struct kvq_memory {
  size_t struct_size;
  int32_t num_pages, num_sink_slots, num_ring_slots; /**< entries of the pools, of pages: of the largest one. For N
                                                          page_tokens a sequence counts (N + 2 page_size - 2) /
                                                          page_size pages, wherever they begin, or those of length */
  int64_t page_bytes, sink_bytes, ring_bytes;        /**< of the pools, if pages and slots lie side by side */
  int64_t device_model_bytes;                        /**< kvq_model_device_bytes() */
  int64_t cache_bytes;                               /**< kvq_cache_device_bytes() */
  int64_t decode_workspace_bytes, prefill_workspace_bytes; /**< kvq_plan_workspace_bytes() */
  int64_t total_bytes;                                     /**< of all this, with one workspace for all calls */
  int64_t sequence_page_bytes;                             /**< of one sequence's pages */
  int64_t sequence_window_bytes; /**< of one sequence's sink slot and ring slot, which hold its first and last tokens
                                      once more, beside their codes */
  double coded_bits;             /**< of an element of a key or value in a page, scales and minima included */
  double effective_bits; /**< bits of one sequence's pages and slots for each element of its keys and values: rows that
                              are not filled yet, of the last page and of slots, count, too */
  int64_t write_workspace_bytes; /**< as decode_workspace_bytes, exact in any case */
} kvq_memory;

/** Computes the memory that a model, a cache for some sequences, and calls need. Needs no device. KVQ_UNSUPPORTED if
 * workspaces are asked for and no kernel supports a layer.
 * @param memory  with struct_size set */
KVQ_API kvq_status kvq_memory_estimate(const kvq_model* model, const kvq_memory_options* options, kvq_memory* memory,
                                       kvq_error* error);

/* ---- Write: rotate, quantize and store new tokens ---- */

/** All pointers are to device memory. */
typedef struct kvq_write_args {
  size_t struct_size;
  int32_t num_tokens;                     /**< T; 0 does nothing */
  const void* k;                          /**< [T, Hkv, D] after RoPE, 16-byte aligned; heads D apart */
  const void* v;                          /**< [T, Hkv, D] */
  int64_t k_token_stride, v_token_stride; /**< elements from token to token, multiples of 8 below 2^32; 0: Hkv D */
  const int64_t* slot_mapping;   /**< [T] from kvq_step_run, or the engine's own: page * page_size + slot. Negative: not
                                      written */
  const int64_t* window_mapping; /**< [T] from kvq_step_run; null without windows */
  void* workspace;               /**< 256-byte aligned; or null (kvq_plan_workspace_bytes) */
  size_t workspace_bytes;        /**< any number */
} kvq_write_args;

/** Enqueues the write of one layer's tokens. Slots that are not in the mappings keep their bytes. */
KVQ_API kvq_status kvq_write_run(const kvq_plan* plan, const kvq_cache* cache, int32_t layer,
                                 const kvq_write_args* args, kvq_stream stream, kvq_error* error);

/* ---- Decode: attention of the newest tokens of each sequence over the cache ---- */

/** All pointers but `sequences` are to device memory. */
typedef struct kvq_decode_args {
  size_t struct_size;
  const kvq_sequences* sequences; /**< at most max_batch; 0 does nothing. Lengths: with the new tokens, which are in the
                                     cache. A query that sees no token has the result 0, and an LSE of minus infinity */
  const void* q; /**< [T, Hq, D] after RoPE, as the served weights give it; 16-byte aligned, heads D apart. Without
                    q_indptr T is B: one new token of each sequence */
  void* out;     /**< [T, Hq, D]; in the rotated basis if V is folded */
  int64_t q_stride, out_stride; /**< elements from token to token, q_stride a multiple of 8; 0: Hq D */
  float* lse_natural;           /**< [T, Hq] natural logarithm (base e) of the sum of exponentials, the learned sink's
                                     included; or null. For base 2, which FlashInfer has, divide by ln 2 */
  const float* sink_logits;     /**< [Hq] learned attention sinks, or null */
  float softmax_scale;          /**< 0: the model's */
  int32_t sliding_window;       /**< tokens that a query sees, itself included; 0: the model's; -1: all */
  void* workspace;              /**< 256-byte aligned */
  size_t workspace_bytes;
  const int32_t* q_indptr; /**< [B + 1] ascending: rows of each sequence's new tokens, its last ones, at most
                              max_new_tokens each; or null */
  int32_t num_tokens;      /**< T, with q_indptr */
  float logit_softcap;     /**< scores become softcap * tanh(score / softcap); 0: the model's; below 0: none */
  /** [T] bit i: the query sees new token i of its sequence, for a tree of drafts. All see the tokens before the new
   * ones. Null: each query sees the new tokens up to its own. A sliding window goes by positions in either case. */
  const uint32_t* token_masks;
  /** Positions that queries may see, [first, last) of each sequence, [B] each; null: from 0, to the end. With
   * lse_natural and kvq_merge_run, results over parts of the keys become the result over all keys: give sink_logits to
   * one part only. Pages outside are not read. */
  const int32_t *first, *last;
} kvq_decode_args;

/** Enqueues the attention of one layer. Which rows are exact goes by the length of the sequence, for all its queries.
 */
KVQ_API kvq_status kvq_decode_run(const kvq_plan* plan, const kvq_cache* cache, int32_t layer,
                                  const kvq_decode_args* args, kvq_stream stream, kvq_error* error);

/* ---- Append: a decode step of one layer in one call ---- */

/** All pointers but `sequences` are to device memory. Without q_indptr, row b of q, k and v is the one new token of
 * sequence b, and T is B. */
typedef struct kvq_append_args {
  size_t struct_size;
  const kvq_sequences* sequences; /**< at most max_batch; lengths with the new tokens. 0 does nothing */
  const void* q;                  /**< [T, Hq, D] as in kvq_decode_args */
  const void* k;                  /**< [T, Hkv, D] as in kvq_write_args; so is v */
  const void* v;
  void* out;                                        /**< [T, Hq, D] as in kvq_decode_args */
  int64_t q_stride, k_stride, v_stride, out_stride; /**< elements from token to token; 0: heads times D */
  const int64_t* slot_mapping;   /**< [T] from kvq_step_run, whose token_indptr is q_indptr, or 0, 1, ..., B; negative:
                                      not written */
  const int64_t* window_mapping; /**< [T] from kvq_step_run; null without windows */
  float* lse_natural;            /**< from here on as in kvq_decode_args */
  const float* sink_logits;
  float softmax_scale;
  int32_t sliding_window;
  void* workspace;
  size_t workspace_bytes;
  const int32_t* q_indptr;
  int32_t num_tokens;
  float logit_softcap;
  const uint32_t* token_masks;
} kvq_append_args;

/**
 * Enqueues the write of the new tokens of each sequence and the attention of their queries, of one layer. It promises:
 *
 * - All arguments are checked before anything is enqueued: both parts are, or none.
 * - What is stored and the results are those of kvq_write_run and then kvq_decode_run with these arguments, where
 *   results may differ by rounding.
 * - A sequence attends to its own new tokens. Whether it already sees a token that this call writes for another
 *   sequence, of whose pages it holds some (a draft of the same text), is not promised: call kvq_write_run and
 *   kvq_decode_run for such batches.
 * - The plan's decode workspace suffices.
 *
 * How many kernels this takes is not promised.
 */
KVQ_API kvq_status kvq_append_run(const kvq_plan* plan, const kvq_cache* cache, int32_t layer,
                                  const kvq_append_args* args, kvq_stream stream, kvq_error* error);

/* ---- Prefill: attention of new tokens over cached tokens and the new tokens themselves ---- */

/** All pointers but `sequences` are to device memory. Query i of a sequence's chunk sees its prefix and the new tokens
 * 0 to i. */
typedef struct kvq_prefill_args {
  size_t struct_size;
  const kvq_sequences* sequences; /**< at most max_batch; 0 does nothing. Lengths: with the new tokens if they are
                                     written. With a sliding window, pages before it are not read */
  const int32_t* prefix_lens; /**< [B] tokens before the new ones; null: seq_lens, if none of the new ones is written */
  int32_t num_tokens;         /**< T rows of q, k, v and out */
  const int32_t* q_indptr;    /**< [B + 1] ascending: rows of each sequence's new tokens */
  const void* q; /**< [T, Hq, D] after RoPE, as the served weights give it; 16-byte aligned, heads D apart */
  const void* k; /**< [T, Hkv, D] as the served weights give them; so is v */
  const void* v;
  void* out;                  /**< [T, Hq, D]; in the rotated basis if V is folded, as v is */
  int64_t q_stride, k_stride; /**< elements from token to token, multiples of 8; 0: heads times D */
  int64_t v_stride, out_stride;
  float* lse_natural;       /**< [T, Hq] as in kvq_decode_args, or null */
  const float* sink_logits; /**< [Hq] learned attention sinks, or null */
  float softmax_scale;      /**< 0: the model's */
  int32_t sliding_window;   /**< tokens that a query sees, itself included; 0: the model's; -1: all */
  void* workspace;          /**< 256-byte aligned */
  size_t workspace_bytes;
  float logit_softcap; /**< as in kvq_decode_args */
} kvq_prefill_args;

/** Enqueues the attention of one layer's new tokens. */
KVQ_API kvq_status kvq_prefill_run(const kvq_plan* plan, const kvq_cache* cache, int32_t layer,
                                   const kvq_prefill_args* args, kvq_stream stream, kvq_error* error);

/* ---- Merge: results of attention over parts of the keys ---- */

/** All pointers are to device memory. Heads are D apart. */
typedef struct kvq_merge_args {
  size_t struct_size;
  int32_t num_states; /**< S results of the same queries over different keys: ranges of positions, ranks of context
                         parallelism, a shared prefix and the rest */
  int32_t num_tokens; /**< T; 0 does nothing */
  int32_t num_heads;  /**< H */
  int32_t head_dim;   /**< D, a multiple of 8 */
  int32_t activation; /**< kvq_activation of the results */
  const void* states; /**< [S, T, H, D] 16-byte aligned */
  int64_t state_stride, token_stride; /**< elements, multiples of 8; 0: T times token_stride, H D */
  const float* state_lse_natural;     /**< [S, T, H] base e; minus infinity: the result counts for nothing */
  void* out;                          /**< [T, H, D] 16-byte aligned; may be one of the results */
  int64_t out_stride;                 /**< elements from token to token; 0: H D */
  float* lse_natural;                 /**< [T, H] of all keys, or null; apart from state_lse_natural */
} kvq_merge_args;

/** Enqueues the merge. Needs no plan; the first call on a device, which loads the kernel, must not be captured. Results
 * are rounded to 16 bits before the merge and behind it. */
KVQ_API kvq_status kvq_merge_run(const kvq_merge_args* args, kvq_stream stream, kvq_error* error);

/* ---- Dequantize: cached rows as 16-bit numbers, for engines with a prefill of their own ---- */

typedef enum kvq_dequantize_flags {
  KVQ_DEQUANTIZE_ROTATED = 1 /**< rows as they are stored: rotated, center subtracted */
} kvq_dequantize_flags;

/** All pointers but `sequences` are to device memory. */
typedef struct kvq_dequantize_args {
  size_t struct_size;
  const kvq_sequences* sequences; /**< 0 does nothing */
  uint32_t flags;                 /**< KVQ_DEQUANTIZE_... */
  int32_t num_rows;               /**< of k and v */
  const int32_t* first;           /**< [B] position of the first token to read, or null: 0 */
  const int32_t* last;            /**< [B] position behind the last token to read, or null: all */
  const int32_t*
      out_indptr; /**< [B + 1] ascending: rows of each sequence; rows behind those asked for stay as they are */
  void* k;        /**< [num_rows, Hkv, D] 16-byte aligned; heads are D apart; so is v */
  void* v;
  int64_t k_stride, v_stride; /**< elements from token to token, multiples of 8; 0: Hkv D */
} kvq_dequantize_args;

/** Enqueues the dequantization of one layer's tokens, in the basis of the served model's rows: rotations and centers
 * that are not folded are undone. */
KVQ_API kvq_status kvq_dequantize_run(const kvq_plan* plan, const kvq_cache* cache, int32_t layer,
                                      const kvq_dequantize_args* args, kvq_stream stream, kvq_error* error);

/* ---- Self-test ---- */

/** Result of replaying one layer's golden rows. */
typedef struct kvq_selftest_layer {
  size_t struct_size;
  int32_t layer;
  int32_t status;        /**< kvq_status: the worse of the two below */
  int32_t write_status;  /**< KVQ_OK: the write kernel makes the expected codes */
  int32_t decode_status; /**< KVQ_OK: the decode kernel's attention over the expected codes is the expected one */
  int64_t rows;          /**< K and V rows that were written and compared */
  int64_t firm_rows;     /**< of them, those whose bytes must be equal */
  int64_t firm_faults;   /**< firm rows with other bytes */
  int64_t soft_faults;   /**< other rows whose dequantized values are too far from the expected ones */
  double output_error;   /**< largest error of an output, relative to the largest output of its head */
  char message[256];     /**< the first fault, or why write or decode was not run; else empty */
} kvq_selftest_layer;

/**
 * Replays the artifact's golden rows of this rank's heads on the current device, without windows. It writes the rows
 * and compares codes: the bytes of firm rows must be equal, other rows must dequantize to within one step. Then it
 * attends over the expected codes and compares the result, to 2^-7 of the largest output of a head. If a dense rotation
 * is not orthogonal, its terms may cancel; kernels apply it in two 16-bit parts, so its rounding errors may exceed the
 * margin of firm rows. Such rows count as not firm, and results may differ by as much more. Golden rows are bfloat16;
 * for a model that computes in fp16 they are converted, and rows that change are not firm. Allocates device memory and
 * waits for the stream.
 *
 * KVQ_OK: every layer passed. KVQ_MISMATCH: a layer failed. KVQ_UNSUPPORTED: none failed, but some part could not be
 * run (no golden rows, none that fp16 can represent, or no kernel), which never counts as passed. Other codes: the test
 * itself failed.
 *
 * @param layers    [capacity] results in order of layer, with struct_size set in the first; may be null with capacity 0
 * @param count     result: number of this rank's layers, also if it exceeds capacity; may be null
 */
KVQ_API kvq_status kvq_selftest(const kvq_model* model, kvq_selftest_layer* layers, int32_t capacity, int32_t* count,
                                kvq_stream stream, kvq_error* error);

#ifdef __cplusplus
}
#endif

#endif /* KVQ_RUNTIME_H */
