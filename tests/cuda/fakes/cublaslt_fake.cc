#include "cublaslt_fake.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "../../../ffi/cuda/cublas/cublaslt_library.h"
#include "gpu_fake.h"
#include "jaxcomm/small_float.h"

namespace jaxcomm {
namespace fake {

thread_local LastProduct last_product;
thread_local bool has_cublaslt = true;
thread_local int num_products = 0;

namespace {

using namespace cublaslt;

struct FakeOperation {
  int compute_type;
  cudaDataType scale_type;
  bool transposes_b = false;
};
struct FakeLayout {
  cudaDataType type;
  uint64_t rows, columns;
  int64_t leading;
};
struct FakePreference {
  uint64_t workspace_bytes = 0;
  uint32_t reduction_schemes = 7;                 // all
  uint32_t alignments[4] = {256, 256, 256, 256};  // cuBLASLt's defaults
};

// Column-major, as cuBLASLt's.
struct FakeMatrix {
  FakeLayout layout;
  char* data;

  size_t At(uint64_t row, uint64_t column) const { return row + column * static_cast<uint64_t>(layout.leading); }
  double Get(uint64_t row, uint64_t column) const {
    const size_t at = At(row, column);
    switch (layout.type) {
      case CUDA_R_16F:
        return Float16::Decode(reinterpret_cast<uint16_t*>(data)[at]);
      case CUDA_R_16BF:
        return BFloat16::Decode(reinterpret_cast<uint16_t*>(data)[at]);
      case CUDA_R_32F:
        return reinterpret_cast<float*>(data)[at];
      default:
        return reinterpret_cast<double*>(data)[at];
    }
  }
  void Set(uint64_t row, uint64_t column, double value) const {
    const size_t at = At(row, column);
    const auto narrow = static_cast<float>(value);
    switch (layout.type) {
      case CUDA_R_16F:
        reinterpret_cast<uint16_t*>(data)[at] = Float16::Encode(narrow);
        break;
      case CUDA_R_16BF:
        reinterpret_cast<uint16_t*>(data)[at] = BFloat16::Encode(narrow);
        break;
      case CUDA_R_32F:
        reinterpret_cast<float*>(data)[at] = narrow;
        break;
      default:
        reinterpret_cast<double*>(data)[at] = value;
    }
  }
};

FakeOperation& Of(Operation operation) { return *reinterpret_cast<FakeOperation*>(operation); }
FakeLayout& Of(Layout layout) { return *reinterpret_cast<FakeLayout*>(layout); }
FakePreference& Of(Preference preference) { return *reinterpret_cast<FakePreference*>(preference); }

uint64_t Bits(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// Rounds to the 10 explicit bits of TF32, as the fast type does.
double ToTf32(double value) {
  const auto narrow = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &narrow, sizeof bits);
  bits &= ~uint32_t{0x1fff};
  float rounded;
  std::memcpy(&rounded, &bits, sizeof rounded);
  return rounded;
}

// Types that the table of NVIDIA's documentation of cublasLtMatmul has, among those with matrices of floats.
bool IsListed(const FakeOperation& operation, cudaDataType operands, cudaDataType result) {
  const bool same = operands == result;
  switch (operation.compute_type) {
    case kCompute32F:
      return operation.scale_type == CUDA_R_32F &&
             (operands == CUDA_R_32F
                  ? same
                  : (operands == CUDA_R_16F || operands == CUDA_R_16BF) && (same || result == CUDA_R_32F));
    case kCompute32FFastTf32:
      return operation.scale_type == CUDA_R_32F && operands == CUDA_R_32F && same;
    default:
      return operation.compute_type == kCompute64F && operation.scale_type == CUDA_R_64F && operands == CUDA_R_64F &&
             same;
  }
}

bool Agree(const FakeOperation& operation, const FakeLayout& a, const FakeLayout& b, const FakeLayout& d) {
  for (const FakeLayout& layout : {a, b, d}) {
    if (layout.leading < static_cast<int64_t>(layout.rows)) return false;
  }
  const auto [rows, columns] = operation.transposes_b ? std::pair{b.columns, b.rows} : std::pair{b.rows, b.columns};
  return a.columns == rows && a.rows == d.rows && columns == d.columns;
}

void Multiply(const FakeOperation& operation, const FakeMatrix& a, const FakeMatrix& b, const FakeMatrix& d,
              bool adds) {
  const bool rounds = operation.compute_type == kCompute32FFastTf32;
  std::vector<double> sums;
  for (uint64_t j = 0; j < d.layout.columns; ++j) {
    for (uint64_t i = 0; i < d.layout.rows; ++i) {
      double sum = adds ? d.Get(i, j) : 0;
      for (uint64_t k = 0; k < a.layout.columns; ++k) {
        const double x = a.Get(i, k), y = operation.transposes_b ? b.Get(j, k) : b.Get(k, j);
        sum += rounds ? ToTf32(x) * ToTf32(y) : x * y;
      }
      sums.push_back(sum);
    }
  }
  for (uint64_t j = 0; j < d.layout.columns; ++j) {
    for (uint64_t i = 0; i < d.layout.rows; ++i) d.Set(i, j, sums[j * d.layout.rows + i]);
  }
}

Result Matmul(Handle handle, Operation operation, const void* alpha, const void* a, Layout a_layout, const void* b,
              Layout b_layout, const void* beta, const void* c, Layout c_layout, void* d, Layout d_layout,
              const Algorithm* algorithm, void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  if (Fails("cublasLtMatmul")) return 13;
  ++num_products;
  const FakeOperation of = Of(operation);
  const bool wide = of.scale_type == CUDA_R_64F;
  CHECK((wide ? *static_cast<const double*>(alpha) : *static_cast<const float*>(alpha)) == 1);
  const double kept = wide ? *static_cast<const double*>(beta) : *static_cast<const float*>(beta);
  CHECK(kept == 0 || kept == 1);
  CHECK(handle != nullptr && c == d && c_layout == d_layout && algorithm->data[0] == 0xa1);
  // The algorithm is for these arguments only.
  CHECK(algorithm->data[1] == Bits(operation) && algorithm->data[2] == Bits(a_layout));
  CHECK(algorithm->data[3] == Bits(b_layout) && algorithm->data[4] == Bits(d_layout));
  CHECK(algorithm->data[5] == workspace_bytes && (workspace_bytes == 0 || Bits(workspace) % 256 == 0));
  const auto matrix = [](const void* data, Layout layout) {
    return FakeMatrix{Of(layout), static_cast<char*>(const_cast<void*>(data))};
  };
  const FakeMatrix x = matrix(a, a_layout), y = matrix(b, b_layout), z = matrix(d, d_layout);
  AnyOf(stream).Push([=] {
    if (workspace_bytes > 0) std::memset(workspace, 0x77, workspace_bytes);
    Multiply(of, x, y, z, kept == 1);
  });
  return 0;
}

Result FindAlgorithm(Handle, Operation operation, Layout a, Layout b, Layout c, Layout d, Preference preference, int,
                     Heuristic* heuristic, int* num_found) {
  if (Fails("no algorithm")) return *num_found = 0, 0;
  if (Fails("not supported")) return 15;
  if (Fails("cublasLtMatmulAlgoGetHeuristic")) return 7;
  if (c != d || Of(a).type != Of(b).type || !IsListed(Of(operation), Of(a).type, Of(d).type)) return 15;
  if (!Agree(Of(operation), Of(a), Of(b), Of(d))) return 7;
  const FakePreference& of = Of(preference);
  CHECK(of.reduction_schemes == 2);
  for (const uint32_t alignment : of.alignments) CHECK(alignment == of.alignments[0]);
  last_product = {Of(operation).compute_type, of.alignments[0], of.workspace_bytes};
  heuristic->algorithm = {{0xa1, Bits(operation), Bits(a), Bits(b), Bits(d), of.workspace_bytes}};
  return *num_found = 1, 0;
}

}  // namespace
}  // namespace fake

StatusOr<const CublasLtLibrary*> CublasLtLibrary::Open() {
  using namespace fake;
  if (!has_cublaslt) return UnavailableError("no cuBLASLt: none here");
  static const CublasLtLibrary library = [] {
    CublasLtLibrary made;
    made.path = "libcublasLt.so.fake";
    made.Create = [](Handle* handle) {
      if (Fails("cublasLtCreate")) return 1;
      return *handle = reinterpret_cast<Handle>(std::malloc(1)), 0;
    };
    made.MatmulDescCreate = [](Operation* operation, int compute_type, cudaDataType scale_type) {
      if (Fails("cublasLtMatmulDescCreate")) return 3;
      return *operation = reinterpret_cast<Operation>(new FakeOperation{compute_type, scale_type}), 0;
    };
    made.MatmulDescSetAttribute = [](Operation operation, int attribute, const void* value, size_t bytes) {
      if (Fails("cublasLtMatmulDescSetAttribute")) return 7;
      CHECK(attribute == kTransposeB && bytes == 4 && *static_cast<const int32_t*>(value) == kTransposed);
      return Of(operation).transposes_b = true, 0;
    };
    made.MatmulDescDestroy = [](Operation operation) { return delete &Of(operation), 0; };
    made.MatrixLayoutCreate = [](Layout* layout, cudaDataType type, uint64_t rows, uint64_t columns, int64_t leading) {
      if (Fails("cublasLtMatrixLayoutCreate")) return 3;
      CHECK(rows > 0 && columns > 0);  // cuBLASLt refuses others
      return *layout = reinterpret_cast<Layout>(new FakeLayout{type, rows, columns, leading}), 0;
    };
    made.MatrixLayoutDestroy = [](Layout layout) { return delete &Of(layout), 0; };
    made.MatmulPreferenceCreate = [](Preference* preference) {
      if (Fails("cublasLtMatmulPreferenceCreate")) return 3;
      return *preference = reinterpret_cast<Preference>(new FakePreference), 0;
    };
    made.MatmulPreferenceSetAttribute = [](Preference preference, int attribute, const void* value, size_t bytes) {
      if (Fails("cublasLtMatmulPreferenceSetAttribute")) return 7;
      FakePreference& of = Of(preference);
      if (attribute == kMaxWorkspaceBytes) {
        CHECK(bytes == 8);
        std::memcpy(&of.workspace_bytes, value, bytes);
      } else if (attribute == kReductionSchemes) {
        CHECK(bytes == 4);
        std::memcpy(&of.reduction_schemes, value, bytes);
      } else {
        CHECK(bytes == 4 && attribute >= 5 && attribute <= 8);
        std::memcpy(&of.alignments[attribute - 5], value, bytes);
      }
      return 0;
    };
    made.MatmulPreferenceDestroy = [](Preference preference) { return delete &Of(preference), 0; };
    made.MatmulAlgoGetHeuristic = &FindAlgorithm;
    made.Matmul = &fake::Matmul;
    return made;
  }();
  return &library;
}

}  // namespace jaxcomm
