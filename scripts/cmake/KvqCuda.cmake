# KVQ_CUDA: AUTO uses nvcc if CMake finds it, ON requires nvcc, OFF does not look for nvcc. KVQ_HAVE_CUDA is the result:
# targets with CUDA sources exist only if it is true; all other targets build and pass their tests without nvcc.
include(KvqKernelTable)
set(KVQ_HAVE_CUDA OFF)
if(NOT KVQ_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # Tuned and measured on 90. For one binary that runs everywhere: -DCMAKE_CUDA_ARCHITECTURES="80;86;89;90;100;120".
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 90)
    endif()
    enable_language(CUDA)
    # CMake 3.25.1 does not know that nvcc has C++20 since version 12.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.4) # the first with __maxnreg__
      find_package(CUDAToolkit REQUIRED)
      set(KVQ_HAVE_CUDA ON)
      # The host code of kernels' sources only launches them.
      target_compile_options(kvq_options INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-O1>)
      # CI compiles the few kernels and never runs them. Optimized, they would take nvcc four to ten times as long.
      if(KVQ_KERNELS STREQUAL "few" AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
        target_compile_options(kvq_options INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)
      endif()
    elseif(KVQ_CUDA STREQUAL "ON")
      message(
        FATAL_ERROR
        "kvq: KVQ_CUDA=ON, but nvcc is ${CMAKE_CUDA_COMPILER_VERSION}; the kernels need 12.4 or later."
      )
    else()
      message(STATUS "kvq: nvcc is ${CMAKE_CUDA_COMPILER_VERSION}; the CUDA parts need 12.4 or later")
    endif()
  elseif(KVQ_CUDA STREQUAL "ON")
    message(
      FATAL_ERROR
      "kvq: KVQ_CUDA=ON, but there is no nvcc. Install the CUDA Toolkit or configure with KVQ_CUDA=AUTO."
    )
  endif()
endif()
message(STATUS "kvq: CUDA parts ${KVQ_HAVE_CUDA}")
