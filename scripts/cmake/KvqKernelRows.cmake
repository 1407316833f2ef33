# kvq_kernel_rows(<variants.json> <out variable>) writes the rows of variants.json as plain data into the build folder
# (kvq/plan/kernel_rows.h), for builds with and without CUDA, and returns the source's name. The file is written only if
# its text changes.
function(kvq_kernel_rows table out)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table})
  file(READ ${table} json)
  set(rows "")
  foreach(verb decode quantize_write dequantize prefill)
    string(JSON count LENGTH "${json}" ${verb})
    math(EXPR last "${count} - 1")
    foreach(i RANGE ${last})
      string(JSON head_dim GET "${json}" ${verb} ${i} head_dim)
      set(fields "KernelVerb::${verb}, ${head_dim}")
      foreach(field k v activation)
        string(JSON ${field} ERROR_VARIABLE none GET "${json}" ${verb} ${i} ${field})
        if(none)
          set(${field} "")
        endif()
      endforeach()
      string(JSON heads ERROR_VARIABLE none GET "${json}" ${verb} ${i} heads)
      if(none)
        set(heads 0)
      endif()
      string(APPEND rows "      {${fields}, \"${k}\", \"${v}\", ${heads}, \"${activation}\"},\n")
    endforeach()
  endforeach()
  set(file ${CMAKE_CURRENT_BINARY_DIR}/kernel_rows.cpp)
  file(
    CONFIGURE
    OUTPUT ${file}
    CONTENT
      "#include <kvq/plan/kernel_rows.h>

namespace kvq {
std::span<const KernelRow> kernel_rows() {
  static constexpr KernelRow table[] = {
${rows}  };
  return table;
}
}
"
  )
  set(${out} ${file} PARENT_SCOPE)
endfunction()
