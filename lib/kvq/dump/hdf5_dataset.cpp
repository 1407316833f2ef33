#include <kvq/core/error.h>
#include <kvq/dump/hdf5.h>
#include <kvq/dump/hdf5_detail.h>

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace kvq::hdf5 {
namespace {

constexpr int kMaxRank = 8;

std::vector<std::int64_t> shape_of(hid_t dataset, const std::string& place) {
  const SpaceHandle space(H5Dget_space(dataset));
  const int rank = H5Sget_simple_extent_ndims(space);
  if (H5Sget_simple_extent_type(space) != H5S_SIMPLE || rank < 1 || rank > kMaxRank)
    reject(place, fmt::format("expected an array of 1 to {} dimensions", kMaxRank));
  hsize_t extents[kMaxRank];
  H5Sget_simple_extent_dims(space, extents, nullptr);
  std::vector<std::int64_t> shape;
  for (int i = 0; i < rank; ++i) {
    if (!std::in_range<std::int64_t>(extents[i])) reject(place, fmt::format("extent {} is too large", extents[i]));
    shape.push_back(static_cast<std::int64_t>(extents[i]));
  }
  return shape;
}

std::uint64_t bytes_of(const std::vector<std::int64_t>& shape, std::size_t element_size, const std::string& place) {
  std::uint64_t bytes = element_size;
  for (const std::int64_t extent : shape)
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &bytes)) reject(place, "its size overflows");
  return bytes;
}

/// Returns the storage layout: contiguous or chunked. Refuses other layouts, filters and external files.
H5D_layout_t plain_layout(hid_t dataset, const std::string& place) {
  const PropertyHandle creation(H5Dget_create_plist(dataset));
  const H5D_layout_t layout = H5Pget_layout(creation);
  if (layout != H5D_CONTIGUOUS && layout != H5D_CHUNKED)
    reject(place, "is compact or virtual, expected contiguous or chunked storage", ErrorKind::unsupported);
  if (H5Pget_external_count(creation) != 0)
    reject(place, "is stored in other files, expected contiguous or chunked storage", ErrorKind::unsupported);
  if (H5Pget_nfilters(creation) != 0)
    reject(place, "is compressed or filtered, expected plain storage", ErrorKind::unsupported,
           "h5repack -f NONE <in.h5> <out.h5> removes the filters");
  return layout;
}

std::uint64_t file_size(int descriptor, const std::string& place) {
  struct stat status;
  if (::fstat(descriptor, &status) != 0) reject(place, "cannot read the size of the file", ErrorKind::io);
  return static_cast<std::uint64_t>(status.st_size);
}

/// A dataset may claim this many bytes for each byte that is on disk: memory for reading it stays in proportion to what
/// somebody stored.
constexpr std::uint64_t kMostPerStoredByte = 4;

/// Bytes of [begin, end) that are no holes of a sparse file, counted up to `enough`. A file system that does not know
/// holes has none.
std::uint64_t stored_bytes(int descriptor, std::uint64_t begin, std::uint64_t end, std::uint64_t enough) {
  const off_t before = ::lseek(descriptor, 0, SEEK_CUR);  // HDF5 uses the same descriptor
  std::uint64_t stored = 0, at = begin;
  while (at < end && stored < enough) {
    const off_t data = ::lseek(descriptor, static_cast<off_t>(at), SEEK_DATA);
    if (data < 0 && errno != ENXIO) stored = enough;  // ENXIO: only a hole follows
    if (data < 0 || static_cast<std::uint64_t>(data) >= end) break;
    const off_t hole = ::lseek(descriptor, data, SEEK_HOLE);
    const std::uint64_t stop = hole < 0 ? end : std::min(end, static_cast<std::uint64_t>(hole));
    stored += stop - static_cast<std::uint64_t>(data);
    at = stop;
  }
  ::lseek(descriptor, before, SEEK_SET);
  return stored;
}

void read_exactly(int descriptor, std::uint64_t offset, std::span<std::byte> target, const std::string& place) {
  constexpr std::size_t kLargestRead = std::size_t{1} << 30;  // Linux reads at most 2 GiB - 4 KiB in one call
  while (!target.empty()) {
    const auto count =
        ::pread(descriptor, target.data(), std::min(target.size(), kLargestRead), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) reject(place, "cannot be read: " + std::generic_category().message(errno), ErrorKind::io);
    if (count == 0) reject(place, fmt::format("the file ends {} bytes early", target.size()));
    offset += static_cast<std::uint64_t>(count);
    target = target.subspan(static_cast<std::size_t>(count));
  }
}

}  // namespace

Dataset::Dataset(DatasetHandle handle, std::string place, int descriptor)
    : Object(handle, std::move(place)),
      handle_(std::move(handle)),
      type_(H5Dget_type(handle_)),
      descriptor_(descriptor) {
  layout_ = plain_layout(handle_, this->place());
  element_ = element_of(type_);
  shape_ = shape_of(handle_, this->place());
  bytes_ = bytes_of(shape_, H5Tget_size(type_), this->place());
  if (bytes_ > 0) check_storage();
}

/// A dataset may declare any extent without storing a byte, and HDF5 would then read zeros. Missing bytes are a fault,
/// which is found here, before a buffer of that size is allocated.
void Dataset::check_storage() {
  const std::uint64_t file_bytes = file_size(descriptor_, place());
  const std::uint64_t stored = bytes_ <= file_bytes ? H5Dget_storage_size(handle_) : 0;
  const haddr_t offset = layout_ == H5D_CONTIGUOUS ? H5Dget_offset(handle_) : 0;
  if (offset == HADDR_UNDEF || stored < bytes_ || stored > file_bytes || offset > file_bytes - stored)
    fail(fmt::format("expected {} bytes of data, but the file does not hold them (never written, or cut off)", bytes_));
  offset_ = offset;
  // The chunks of chunked data may lie anywhere, so for them the whole file counts.
  const std::uint64_t begin = layout_ == H5D_CONTIGUOUS ? offset : 0;
  const std::uint64_t end = layout_ == H5D_CONTIGUOUS ? offset + bytes_ : file_bytes;
  const std::uint64_t needed = bytes_ / kMostPerStoredByte;
  if (const std::uint64_t on_disk = stored_bytes(descriptor_, begin, end, needed); on_disk < needed)
    fail(fmt::format("expected {} bytes of data, found {} on disk and holes (a sparse file)", bytes_, on_disk));
}

void Dataset::read_part(std::uint64_t begin, std::span<std::byte> target) const {
  KVQ_ASSERT(layout_ == H5D_CONTIGUOUS && begin <= bytes_ && target.size() <= bytes_ - begin);
  read_exactly(descriptor_, offset_ + begin, target, place());
}

void Dataset::read(std::span<std::byte> target) const {
  KVQ_ASSERT(element_ != Element::other && target.size() == bytes_);
  if (target.empty()) return;
  if (layout_ == H5D_CONTIGUOUS) return read_exactly(descriptor_, offset_, target, place());
  const CallScope scope;
  // The memory type is the stored type: HDF5 copies the bytes and converts nothing.
  if (H5Dread(handle_, type_, H5S_ALL, H5S_ALL, H5P_DEFAULT, target.data()) < 0)
    fail("cannot be read: " + library_reason());
}

}  // namespace kvq::hdf5
