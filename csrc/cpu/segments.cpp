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

template <class Index, class Key>
class KeyBuilder {
 public:
  KeyBuilder(const Layout& layout, const Batch<Index>& batch, Key* keys,
             Contributions& contributions)
      : layout_(layout), batch_(batch), keys_(keys), contributions_(contributions) {}

  BadLookup build() {
    const int64_t bags = static_cast<int64_t>(layout_.features.size()) * batch_.batch_size;
    const int64_t slices = slice_count(batch_.lookups);
    std::vector<BadLookup> bad(static_cast<size_t>(slices));
    for_each_slice(bags, slices, [&](int64_t slice, int64_t first, int64_t last) {
      bad[static_cast<size_t>(slice)] = visit_bags(
          batch_, first, last,
          [&](int64_t bag, int64_t begin, int64_t end) { return build_bag(bag, begin, end); });
    });
    return first_bad(bad);
  }

 private:
  int64_t build_bag(int64_t bag, int64_t begin, int64_t end) {
    const Feature& feature = layout_.features[static_cast<size_t>(bag / batch_.batch_size)];
    const Table& table = layout_.tables[static_cast<size_t>(feature.table)];
    const int64_t pooled_offset =
        (bag % batch_.batch_size) * layout_.total_columns + feature.first_column;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t index = batch_.indices[i];
      if (index < 0 || index >= table.rows) {
        return i;
      }
      keys_[i] = static_cast<Key>(table.first_row + index);
      contributions_.gradient_offsets[i] =
          batch_.pooling == Pooling::kNone ? i * table.dim : pooled_offset;
    }
    if (contributions_.scales != nullptr) {
      const float length =
          batch_.pooling == Pooling::kMean ? static_cast<float>(end - begin) : 1.0f;
      for (int64_t i = begin; i < end; ++i) {
        const float weight =
            batch_.per_sample_weights != nullptr ? batch_.per_sample_weights[i] : 1.0f;
        contributions_.scales[i] = weight / length;
      }
    }
    return -1;
  }

  const Layout& layout_;
  const Batch<Index>& batch_;
  Key* keys_;
  Contributions& contributions_;
};

// Where the sorted keys change, a segment begins.
template <class Key>
void find_segments(const Key* keys, int64_t lookups, Segments& segments) {
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
BadLookup sort_with_keys(const Layout& layout, const Batch<Index>& batch, Segments& segments,
                         Contributions& contributions) {
  auto keys = uninitialized<Key>(batch.lookups);
  const BadLookup bad = KeyBuilder<Index, Key>(layout, batch, keys.get(), contributions).build();
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
BadLookup sort_by_row(const Layout& layout, const Batch<Index>& batch, Segments& segments,
                      Contributions& contributions) {
  contributions.gradient_offsets = uninitialized<int64_t>(batch.lookups);
  if (batch.per_sample_weights != nullptr || batch.pooling == Pooling::kMean) {
    contributions.scales = uninitialized<float>(batch.lookups);
  }
  const bool short_keys = layout.total_rows <= int64_t{std::numeric_limits<uint32_t>::max()};
  return short_keys ? sort_with_keys<Index, uint32_t>(layout, batch, segments, contributions)
                    : sort_with_keys<Index, uint64_t>(layout, batch, segments, contributions);
}

template BadLookup sort_by_row(const Layout&, const Batch<int32_t>&, Segments&, Contributions&);
template BadLookup sort_by_row(const Layout&, const Batch<int64_t>&, Segments&, Contributions&);

}  // namespace torchrec_ext::cpu
