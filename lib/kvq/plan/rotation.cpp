#include <kvq/plan/rotation.h>

namespace kvq {

const char* to_string(RotationKind kind) {
  switch (kind) {
    case RotationKind::identity: return "identity";
    case RotationKind::block_hadamard: return "block_hadamard";
    case RotationKind::dense: return "dense";
  }
  return "?";
}

const char* to_string(Scope scope) { return scope == Scope::layer ? "layer" : "kv_head"; }

int hadamard_order(int dim) { return dim > 0 ? dim & -dim : 0; }

}  // namespace kvq
