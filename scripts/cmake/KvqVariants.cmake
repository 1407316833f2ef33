# kvq_decode_variants(<variants.json> <out variable>) writes one .cu for each row of the table, and the table itself, into the build
# folder, and names them. Files are touched only if they change.
function(kvq_side side head_dim out)
  if(side STREQUAL "bf16")
    set(${out} "SideTraits<${head_dim}, 16, ${head_dim}, 0>" PARENT_SCOPE)
  elseif(side MATCHES "^([us])([24])g([0-9]+)(b?)$")
    set(numbers 1)
    if(CMAKE_MATCH_1 STREQUAL "u")
      set(numbers 2)
    endif()
    set(bfloat false)
    if(CMAKE_MATCH_4)
      set(bfloat true)
    endif()
    set(${out} "SideTraits<${head_dim}, ${CMAKE_MATCH_2}, ${CMAKE_MATCH_3}, ${numbers}, ${bfloat}>" PARENT_SCOPE)
  else()
    message(FATAL_ERROR "kvq: variants.json: unknown side ${side}")
  endif()
endfunction()

function(kvq_decode_variants table out)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table})
  file(READ ${table} json)
  string(JSON count LENGTH "${json}" decode)
  math(EXPR last "${count} - 1")
  set(files "")
  set(declarations "")
  set(rows "")
  foreach(i RANGE ${last})
    foreach(field IN ITEMS head_dim k v heads activation)
      string(JSON ${field} GET "${json}" decode ${i} ${field})
    endforeach()
    kvq_side(${k} ${head_dim} k_side)
    kvq_side(${v} ${head_dim} v_side)
    math(EXPR team "${heads} / 4")
    set(type __nv_bfloat16)
    if(activation STREQUAL "fp16")
      set(type __half)
    endif()
    set(name decode_d${head_dim}_${k}_${v}_h${heads}_${activation})
    set(file ${CMAKE_CURRENT_BINARY_DIR}/variants/${name}.cu)
    file(CONFIGURE OUTPUT ${file} CONTENT
"#include <kvq/runtime/kernels/decode/launch.cuh>
#include <kvq/runtime/kernels/decode/variant.h>

namespace kvq {
extern const DecodeVariant ${name};
const DecodeVariant ${name} = decode_variant<DecodeTraits<${k_side}, ${v_side}, ${team}, ${type}>>(\"${name}\");
}
")
    list(APPEND files ${file})
    string(APPEND declarations "extern const DecodeVariant ${name};\n")
    string(APPEND rows "    &${name},\n")
  endforeach()
  set(file ${CMAKE_CURRENT_BINARY_DIR}/variants/decode_table.cpp)
  file(CONFIGURE OUTPUT ${file} CONTENT
"#include <kvq/runtime/kernels/decode/variant.h>

namespace kvq {
${declarations}
std::span<const DecodeVariant* const> decode_variants() {
  static const DecodeVariant* const table[] = {
${rows}  };
  return table;
}
}
")
  set(${out} ${files} ${file} PARENT_SCOPE)
endfunction()
