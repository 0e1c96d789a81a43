#include "switchboard.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace jaxcomm {
namespace {

constexpr size_t kMaxClosed = 1 << 14;

}  // namespace

void Switchboard::Register(uint64_t key, std::shared_ptr<Line> line) {
  Waiting waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    lines_[key] = line;
    const auto found = waiting_.find(key);
    if (found == waiting_.end()) return;
    waiting = std::move(found->second);
    waiting_.erase(found);
  }
  // While puts wait, nothing after them in their channel is delivered: events came before, so their order is kept.
  for (const auto& event : waiting.events) event(*line);
  for (const WaitingPut& put : waiting.puts) {
    network_->Accept(put.process, put.id, GivePlace(put.process, put.id, put.header, put.bytes, line));
  }
}

void* Switchboard::GivePlace(int process, uint64_t id, const Header& header, int64_t bytes,
                         const std::shared_ptr<Line>& line) {
  void* const place = line->PlaceOf(header.to, header.space, header.offset_bytes, bytes);
  if (place != nullptr) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (lost_.count(process) == 0) {
      placed_[{process, id}] = line;
      return place;
    }
    lock.unlock();
    line->OnPlaced();
  }
  return nullptr;
}

void Switchboard::Abandon(const Line& line) {
  std::set<int> processes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, of] : placed_) {
      if (of.get() == &line) processes.insert(id.first);
    }
  }
  for (const int process : processes) network_->Drop(process, "its data did not arrive in time");
}

void Switchboard::Unregister(uint64_t key) {
  std::lock_guard<std::mutex> lock(mutex_);
  lines_.erase(key);
  if (closed_.insert(key).second) closed_order_.push_back(key);
  if (closed_order_.size() > kMaxClosed) {
    closed_.erase(closed_order_.front());
    closed_order_.pop_front();
  }
}

void Switchboard::Send(int32_t process, const Header& header, std::unique_ptr<char[]> data, int64_t bytes) {
  const char* payload = data.get();
  network_->Send(process, header.key, &header, sizeof(header), payload, static_cast<size_t>(bytes),
                 [owned = std::shared_ptr<char[]>(std::move(data))](bool) {});
}

void Switchboard::Put(int32_t process, uint64_t key, const Place& to, int64_t offset_bytes,
                      std::unique_ptr<char[]> data, int64_t bytes) {
  Header header;
  header.kind = Kind::kPut;
  header.key = key;
  header.to = to.rank;
  header.space = to.space;
  header.offset_bytes = offset_bytes;
  Send(process, header, std::move(data), bytes);
}

void Switchboard::Signal(int32_t process, uint64_t key, int32_t from, int32_t to) {
  Header header;
  header.kind = Kind::kSignal;
  header.key = key;
  header.from = from;
  header.to = to;
  Send(process, header, nullptr, 0);
}

void Switchboard::SendText(int32_t process, Header header, const std::string& text) {
  std::unique_ptr<char[]> data(new char[text.size()]);
  std::memcpy(data.get(), text.data(), text.size());
  Send(process, header, std::move(data), static_cast<int64_t>(text.size()));
}

void Switchboard::SayLeft(int32_t process, uint64_t key, uint64_t fingerprint, const std::string& what) {
  Header header;
  header.kind = Kind::kLeft;
  header.key = key;
  header.fingerprint = fingerprint;
  SendText(process, header, what);
}

void Switchboard::SayGivenUp(int32_t process, uint64_t key, const std::string& why) {
  Header header;
  header.kind = Kind::kGivenUp;
  header.key = key;
  SendText(process, header, why);
}

std::string Switchboard::Lost(int32_t process) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = lost_.find(process);
  return found == lost_.end() ? "" : found->second;
}

void* Switchboard::Trash(const Message& message) {
  auto& place = texts_[{message.process, message.id}];
  place.reset(new char[std::max<size_t>(message.bytes, 1)]);
  return place.get();
}

void* Switchboard::OnMessage(const Message& message) {
  Header header;
  if (message.header_bytes != sizeof(header)) return Trash(message);
  std::memcpy(&header, message.header, sizeof(header));
  if (header.kind != Kind::kPut) return Trash(message);
  std::shared_ptr<Line> line;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_.count(header.key) > 0) return Trash(message);
    const auto found = lines_.find(header.key);
    if (found == lines_.end()) {
      waiting_[header.key].puts.push_back({message.process, message.id, header, static_cast<int64_t>(message.bytes)});
      return nullptr;
    }
    line = found->second;
  }
  void* const place = GivePlace(message.process, message.id, header, static_cast<int64_t>(message.bytes), line);
  return place != nullptr ? place : Trash(message);
}

void Switchboard::Tell(uint64_t key, std::function<void(Line&)> event) {
  std::shared_ptr<Line> line;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_.count(key) > 0) return;
    const auto found = lines_.find(key);
    if (found == lines_.end()) {
      waiting_[key].events.push_back(std::move(event));
      return;
    }
    line = found->second;
  }
  event(*line);
}

void Switchboard::OnDelivered(const Message& message) {
  Header header;
  std::string text;
  const auto kept = texts_.find({message.process, message.id});
  if (kept != texts_.end()) {
    text.assign(kept->second.get(), message.bytes);
    texts_.erase(kept);
  }
  if (message.header_bytes != sizeof(header)) return;
  std::memcpy(&header, message.header, sizeof(header));
  const int32_t process = message.process;
  switch (header.kind) {
    case Kind::kPut: {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto placed = placed_.find({process, message.id});
      if (placed == placed_.end()) return;
      const std::shared_ptr<Line> line = std::move(placed->second);
      placed_.erase(placed);
      lock.unlock();
      return line->OnPlaced();
    }
    case Kind::kSignal:
      return Tell(header.key, [header](Line& line) { line.OnSignal(header.from, header.to); });
    case Kind::kLeft:
      return Tell(header.key, [=](Line& line) { line.OnLeft(process, header.fingerprint, text); });
    case Kind::kGivenUp:
      return Tell(header.key, [=](Line& line) { line.OnGivenUp(process, text); });
  }
}

void Switchboard::OnPeerLost(int process, const std::string& why) {
  std::vector<std::shared_ptr<Line>> lines;
  std::vector<std::shared_ptr<Line>> placed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    lost_[process] = why;
    for (auto it = placed_.lower_bound({process, 0}); it != placed_.end() && it->first.first == process;) {
      placed.push_back(std::move(it->second));
      it = placed_.erase(it);
    }
    for (const auto& entry : lines_) lines.push_back(entry.second);
  }
  for (const auto& line : lines) line->OnLost(process);
  for (const auto& line : placed) line->OnPlaced();
}

}  // namespace jaxcomm
