#include "segments.h"

#include <limits>
#include <vector>

#include "radix_sort.h"

namespace torchrec_ext::cpu {
namespace {

template <class Value>
std::unique_ptr<Value[]> uninitialized(int64_t size) {
  return std::unique_ptr<Value[]>(new Value[static_cast<size_t>(size)]);
}

// Calls visit_lookups(bag, feature's number, table, begin, end) for all bags, in parallel, once their
// offsets and indices are known to be good.
template <class Index, class Visit>
BadLookup visit_checked_bags(const Layout& layout, const Batch<Index>& batch,
                             const Visit& visit_lookups) {
  const int64_t slices = slice_count(batch.lookups);
  std::vector<BadLookup> bad(static_cast<size_t>(slices));
  const auto visit_bag = [&](int64_t bag, int64_t begin, int64_t end) -> int64_t {
    const int64_t feature = batch.feature_of(bag);
    const Table& table = layout.table_of_feature(feature);
    for (int64_t i = begin; i < end; ++i) {
      if (batch.indices[i] < 0 || batch.indices[i] >= table.rows) {
        return i;
      }
    }
    visit_lookups(bag, feature, table, begin, end);
    return -1;
  };
  for_each_slice(batch.bags, slices, [&](int64_t slice, int64_t first, int64_t last) {
    bad[static_cast<size_t>(slice)] = visit_bags(batch, first, last, visit_bag);
  });
  return first_bad(bad);
}

// Where the sorted keys change, a segment begins.
template <class Key>
void find_segments(const Key* keys, int64_t lookups, OwnedSegments& segments) {
  const int64_t slices = slice_count(lookups);
  std::vector<int64_t> counts(static_cast<size_t>(slices) + 1, 0);
  const auto begins_segment = [keys](int64_t i) { return i == 0 || keys[i] != keys[i - 1]; };
  for_each_slice(lookups, slices, [&](int64_t slice, int64_t begin, int64_t end) {
    int64_t count = 0;
    for (int64_t i = begin; i < end; ++i) {
      count += begins_segment(i) ? 1 : 0;
    }
    counts[static_cast<size_t>(slice) + 1] = count;
  });
  for (size_t slice = 0; slice < static_cast<size_t>(slices); ++slice) {
    counts[slice + 1] += counts[slice];
  }
  segments.count = counts.back();
  segments.rows = uninitialized<int64_t>(segments.count);
  segments.begins = uninitialized<uint32_t>(segments.count + 1);
  for_each_slice(lookups, slices, [&](int64_t slice, int64_t begin, int64_t end) {
    int64_t segment = counts[static_cast<size_t>(slice)];
    for (int64_t i = begin; i < end; ++i) {
      if (begins_segment(i)) {
        segments.rows[segment] = static_cast<int64_t>(keys[i]);
        segments.begins[segment++] = static_cast<uint32_t>(i);
      }
    }
  });
  segments.begins[segments.count] = static_cast<uint32_t>(lookups);
}

template <class Index, class Key>
BadLookup sort_with_keys(const Layout& layout, const Batch<Index>& batch, OwnedSegments& segments) {
  auto keys = uninitialized<Key>(batch.lookups);
  const auto write_keys = [&](int64_t, int64_t, const Table& table, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      keys[i] = static_cast<Key>(table.first_row + batch.indices[i]);
    }
  };
  const BadLookup bad = visit_checked_bags(layout, batch, write_keys);
  if (bad.bag >= 0) {
    return bad;
  }
  auto sorted =
      radix_sort(std::move(keys), batch.lookups, static_cast<uint64_t>(layout.total_rows));
  find_segments(sorted.keys.get(), batch.lookups, segments);
  segments.positions = std::move(sorted.positions);
  return {};
}

}  // namespace

template <class Index>
BadLookup sort_by_row(const Layout& layout, const Batch<Index>& batch, OwnedSegments& segments) {
  const bool short_keys = layout.total_rows <= int64_t{std::numeric_limits<uint32_t>::max()};
  return short_keys ? sort_with_keys<Index, uint32_t>(layout, batch, segments)
                    : sort_with_keys<Index, uint64_t>(layout, batch, segments);
}

template <class Index>
BadLookup find_contributions(const Layout& layout, const Batch<Index>& batch,
                             Contributions& contributions) {
  contributions.gradient_offsets = uninitialized<int64_t>(batch.lookups);
  if (batch.has_scales()) {
    contributions.scales = uninitialized<float>(batch.lookups);
  }
  const auto find = [&](int64_t bag, int64_t number, const Table& table, int64_t begin,
                        int64_t end) {
    const Feature& feature = layout.features[static_cast<size_t>(number)];
    const int64_t first = batch.gradient_offset(begin, bag, number, feature, table.dim);
    const int64_t stride = batch.pooling == Pooling::kNone ? table.dim : 0;
    for (int64_t i = begin; i < end; ++i) {
      contributions.gradient_offsets[i] = first + (i - begin) * stride;
    }
    if (contributions.scales != nullptr) {
      for (int64_t i = begin; i < end; ++i) {
        contributions.scales[i] = batch.scale(i, end - begin);
      }
    }
  };
  return visit_checked_bags(layout, batch, find);
}

template BadLookup sort_by_row(const Layout&, const Batch<int32_t>&, OwnedSegments&);
template BadLookup sort_by_row(const Layout&, const Batch<int64_t>&, OwnedSegments&);
template BadLookup find_contributions(const Layout&, const Batch<int32_t>&, Contributions&);
template BadLookup find_contributions(const Layout&, const Batch<int64_t>&, Contributions&);

}  // namespace torchrec_ext::cpu
