#pragma once

#include <kvq/methods/method.h>

/// One function per method, each in its own file; only the registry calls them.
namespace kvq {

Method oscar_method();
Method saw_int4_method();
Method block_gtq_method();
Method tq_mse_method();
Method kvq_method();
Method quarot_method();
Method random_method();
Method plain_method();

}  // namespace kvq
