include(KvqKernelTable)

# Sets a variable to true if a regular expression has matched a letter, else to false.
macro(kvq_has_letter letter out)
  set(${out} false)
  if(NOT "${letter}" STREQUAL "")
    set(${out} true)
  endif()
endmacro()

# The template arguments of one side of a format.
function(kvq_side side head_dim out)
  if(side STREQUAL "bf16")
    set(${out} "SideTraits<${head_dim}, 16, ${head_dim}, 0>" PARENT_SCOPE)
  elseif(side MATCHES "^([us])([24])g([0-9]+)(b?)(i1)?$")
    set(sizes "${CMAKE_MATCH_2}, ${CMAKE_MATCH_3}")
    set(index_bytes 0)
    if(CMAKE_MATCH_5)
      set(index_bytes 1)
    endif()
    set(numbers 1)
    if(CMAKE_MATCH_1 STREQUAL "u")
      set(numbers 2)
    endif()
    kvq_has_letter("${CMAKE_MATCH_4}" bfloat)
    set(${out} "SideTraits<${head_dim}, ${sizes}, ${numbers}, ${bfloat}, ${index_bytes}>" PARENT_SCOPE)
  elseif(side MATCHES "^w([0-9]+)n1(b?)$")
    kvq_has_letter("${CMAKE_MATCH_2}" bfloat)
    set(${out} "LinearSideTraits<${head_dim}, ${CMAKE_MATCH_1}, ${bfloat}>" PARENT_SCOPE)
  elseif(side MATCHES "^w(8|12)n([1-4])(b?)c$")
    kvq_has_letter("${CMAKE_MATCH_3}" bfloat)
    set(${out} "SegmentSideTraits<${head_dim}, ${CMAKE_MATCH_1}, ${CMAKE_MATCH_2}, ${bfloat}>" PARENT_SCOPE)
  elseif(side MATCHES "^w[0-9]+n1(b?)t([34])$")
    kvq_has_letter("${CMAKE_MATCH_1}" bfloat)
    set(${out} "TableSideTraits<${head_dim}, ${CMAKE_MATCH_2}, ${bfloat}>" PARENT_SCOPE)
  else()
    message(FATAL_ERROR "kvq: variants.json: unknown side ${side}")
  endif()
endfunction()

function(kvq_activation_type activation out)
  set(${out} __nv_bfloat16 PARENT_SCOPE)
  if(activation STREQUAL "fp16")
    set(${out} __half PARENT_SCOPE)
  endif()
endfunction()

# One kind of kernel. ARGUMENTS are its template arguments, in which @K@, @V@, @HEAD_DIM@, @TYPE@ and @HEADS@
# stand for those of a kernel. All kernels of a format are one source, because half of the time that nvcc takes for a
# kernel goes into the headers.
function(kvq_variant_kind kernels which kind out)
  cmake_parse_arguments(ARG "" "FOLDER;TYPE_NAME;MAKER;ARGUMENTS;FUNCTION" "" ${ARGN})
  set(formats "")
  set(files "")
  set(declarations "")
  set(rows "")
  foreach(kernel ${kernels})
    kvq_kernel_fields("${kernel}")
    kvq_kernel_is_in(${which} ${set} is_built)
    if(NOT verb STREQUAL kind OR NOT is_built)
      continue()
    endif()
    set(name ${kind}_d${head_dim})
    set(k_side "")
    set(v_side "")
    if(k)
      kvq_side(${k} ${head_dim} k_side)
      kvq_side(${v} ${head_dim} v_side)
      string(APPEND name _${k}_${v})
    endif()
    set(format ${name})
    if(NOT format IN_LIST formats)
      list(APPEND formats ${format})
      set(definitions_${format} "")
    endif()
    if(heads)
      string(APPEND name _h${heads})
    endif()
    string(APPEND name _${activation})
    kvq_activation_type(${activation} type)
    string(REPLACE "@K@" "${k_side}" arguments "${ARG_ARGUMENTS}")
    string(REPLACE "@V@" "${v_side}" arguments "${arguments}")
    string(REPLACE "@HEAD_DIM@" "${head_dim}" arguments "${arguments}")
    string(REPLACE "@HEADS@" "${heads}" arguments "${arguments}")
    string(REPLACE "@TYPE@" "${type}" arguments "${arguments}")
    string(
      APPEND definitions_${format}
      "extern const ${ARG_TYPE_NAME} ${name};
const ${ARG_TYPE_NAME} ${name} = ${ARG_MAKER}<${arguments}>(\"${name}\");
"
    )
    string(APPEND declarations "extern const ${ARG_TYPE_NAME} ${name};\n")
    string(APPEND rows "    &${name},\n")
  endforeach()
  foreach(format ${formats})
    set(file ${CMAKE_CURRENT_BINARY_DIR}/variants/${format}.cu)
    file(
      CONFIGURE
      OUTPUT ${file}
      CONTENT
        "#include <kvq/runtime/kernels/${ARG_FOLDER}/launch.cuh>

namespace kvq {
${definitions_${format}}}
"
    )
    list(APPEND files ${file})
  endforeach()
  set(file ${CMAKE_CURRENT_BINARY_DIR}/variants/${kind}_table.cpp)
  file(
    CONFIGURE
    OUTPUT ${file}
    CONTENT
      "#include <kvq/runtime/kernels/${ARG_FOLDER}/variant.h>

namespace kvq {
${declarations}
std::span<const ${ARG_TYPE_NAME}* const> ${ARG_FUNCTION}() {
  static const ${ARG_TYPE_NAME}* const table[] = {
${rows}  };
  return table;
}
}
"
  )
  set(${out} ${files} ${file} PARENT_SCOPE)
endfunction()

# The combine kernels that decode kernels of all formats share, one source for each head_dim.
function(kvq_combine_kernels kernels which out)
  set(dims "")
  foreach(kernel ${kernels})
    kvq_kernel_fields("${kernel}")
    kvq_kernel_is_in(${which} ${set} is_built)
    if(NOT verb STREQUAL "decode" OR NOT is_built)
      continue()
    endif()
    list(APPEND dims ${head_dim})
    kvq_activation_type(${activation} type)
    list(APPEND kernels_${head_dim} "template struct DecodeCombine<${head_dim}, ${heads}, ${type}>")
  endforeach()
  list(REMOVE_DUPLICATES dims)
  set(files "")
  foreach(head_dim ${dims})
    list(REMOVE_DUPLICATES kernels_${head_dim})
    string(REPLACE ";" ";\n" instances "${kernels_${head_dim}}")
    set(file ${CMAKE_CURRENT_BINARY_DIR}/variants/combine_d${head_dim}.cu)
    file(
      CONFIGURE
      OUTPUT ${file}
      CONTENT
        "#include <kvq/runtime/kernels/decode/combine_launch.cuh>

namespace kvq {
${instances};
}
"
    )
    list(APPEND files ${file})
  endforeach()
  set(${out} ${files} PARENT_SCOPE)
endfunction()

# kvq_variants(<variants.json> <KVQ_KERNELS> <out variable> <warpgroup out variable>) writes one .cu for each format of
# the tuned kernels that builds with this KVQ_KERNELS have, and the lookup tables, into the build folder, and returns
# their names. A file is written only if its text changes. Kernels with warpgroup products are listed separately,
# because they are compiled for other architectures.
function(kvq_variants table which out warpgroup_out)
  kvq_kernel_table(${table} kernels)
  kvq_variant_kind(
    "${kernels}"
    ${which}
    decode
    decode
    FOLDER decode
    TYPE_NAME DecodeVariant
    MAKER decode_variant
    ARGUMENTS "DecodeTraits<@K@, @V@, @HEADS@, @TYPE@>"
    FUNCTION decode_variants
  )
  kvq_variant_kind(
    "${kernels}"
    ${which}
    quantize_write
    write
    FOLDER quantize_write
    TYPE_NAME WriteVariant
    MAKER write_variant
    ARGUMENTS "@K@, @V@, @TYPE@"
    FUNCTION write_variants
  )
  kvq_variant_kind(
    "${kernels}"
    ${which}
    dequantize
    dequantize
    FOLDER dequantize
    TYPE_NAME DequantizeVariant
    MAKER dequantize_variant
    ARGUMENTS "@K@, @V@, @TYPE@"
    FUNCTION dequantize_variants
  )
  kvq_variant_kind(
    "${kernels}"
    ${which}
    prefill
    prefill
    FOLDER prefill
    TYPE_NAME PrefillVariant
    MAKER prefill_variant
    ARGUMENTS "@HEAD_DIM@, @TYPE@"
    FUNCTION prefill_variants
  )
  kvq_combine_kernels("${kernels}" ${which} combine)
  set(${out} ${decode} ${combine} ${dequantize} PARENT_SCOPE)
  set(${warpgroup_out} ${write} ${prefill} PARENT_SCOPE)
endfunction()
