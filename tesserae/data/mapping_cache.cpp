#include "tesserae/data/mapping_cache.h"

namespace tesserae::data {

const os::Mapping& MappingCache::get(size_t file, const os::Path& path) {
  if (const auto found = where_.find(file); found != where_.end()) {
    recent_.splice(recent_.begin(), recent_, found->second);
    return found->second->second;
  }
  recent_.emplace_front(file, os::files().map(path));
  where_[file] = recent_.begin();
  if (recent_.size() > capacity_) {
    where_.erase(recent_.back().first);
    recent_.pop_back();
  }
  return recent_.front().second;
}

}  // namespace tesserae::data
