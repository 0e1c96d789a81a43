#include "cpu/active_messages.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace jaxcomm {
namespace {

constexpr size_t kMaxClosed = 1 << 14;
constexpr size_t kMaxAborted = 1 << 10;
constexpr size_t kMaxFailedRuns = 16;

}  // namespace

void ActiveMessages::Register(uint64_t key, std::shared_ptr<MessageHandler> handler) {
  Waiting waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    handlers_[key] = handler;
    const auto found = waiting_.find(key);
    if (found == waiting_.end()) return;
    waiting = std::move(found->second);
    waiting_.erase(found);
  }
  // While a put waits, later messages of its channel are not delivered. So all events precede the puts, and running
  // them first keeps the order.
  for (const WaitingEvent& waited : waiting.events) waited.event(*handler);
  for (const WaitingPut& put : waiting.puts) {
    network_->Accept(put.process, put.id, AssignDestination(put.process, put.id, put.header, put.bytes, handler));
  }
}

void* ActiveMessages::AssignDestination(int process, uint64_t id, const Header& header, int64_t bytes,
                                        const std::shared_ptr<MessageHandler>& handler) {
  void* const destination =
      handler->DestinationOf(process, header.fingerprint, header.to, header.space, header.offset_bytes, bytes);
  if (destination != nullptr) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (lost_.count(process) == 0) {
      puts_in_progress_[{process, id}] = handler;
      return destination;
    }
    lock.unlock();
    handler->OnPutDone();
  }
  return nullptr;
}

std::vector<int32_t> ActiveMessages::CancelPuts(const MessageHandler& handler) {
  std::map<int, const char*> processes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, of] : puts_in_progress_) {
      if (of.get() == &handler) processes[id.first] = "its data did not arrive in time";
    }
    for (const auto& [sender, process] : inputs_in_progress_) {
      if (sender == &handler) processes.try_emplace(process, "it did not take its data in time");
    }
  }
  std::vector<int32_t> dropped;
  for (const auto& [process, why] : processes) {
    network_->Drop(process, why);
    dropped.push_back(process);
  }
  return dropped;
}

void ActiveMessages::Unregister(uint64_t key) {
  std::lock_guard<std::mutex> lock(mutex_);
  handlers_.erase(key);
  if (closed_.insert(key).second) closed_order_.push_back(key);
  if (closed_order_.size() > kMaxClosed) {
    closed_.erase(closed_order_.front());
    closed_order_.pop_front();
  }
}

void ActiveMessages::Send(int32_t process, const Header& header, std::unique_ptr<char[]> data, int64_t bytes) {
  const char* payload = data.get();
  // Messages about a whole call must not wait behind payloads that the receiver may never accept. Keys are odd.
  const bool aside = header.kind == Kind::kEntered || header.kind == Kind::kAborted;
  network_->Send(process, aside ? header.key ^ 1 : header.key, &header, sizeof(header), payload,
                 static_cast<size_t>(bytes), [owned = std::shared_ptr<char[]>(std::move(data))](bool) {});
}

ActiveMessages::Header ActiveMessages::HeaderOf(Kind kind, uint64_t key, const Fingerprint& fingerprint) {
  Header header;
  header.kind = kind;
  header.key = key;
  header.fingerprint = fingerprint;
  return header;
}

ActiveMessages::Header ActiveMessages::PutHeader(uint64_t key, const Fingerprint& fingerprint, const Place& to,
                                                 int64_t offset_bytes) {
  Header header = HeaderOf(Kind::kPut, key, fingerprint);
  header.to = to.rank;
  header.space = to.space;
  header.offset_bytes = offset_bytes;
  return header;
}

void ActiveMessages::Put(int32_t process, uint64_t key, const Fingerprint& fingerprint, const Place& to,
                         int64_t offset_bytes, std::unique_ptr<char[]> data, int64_t bytes) {
  Send(process, PutHeader(key, fingerprint, to, offset_bytes), std::move(data), bytes);
}

void ActiveMessages::PutInput(int32_t process, uint64_t key, const Fingerprint& fingerprint, const Place& to,
                              int64_t offset_bytes, const char* data, int64_t bytes,
                              std::shared_ptr<MessageHandler> sender) {
  const Header header = PutHeader(key, fingerprint, to, offset_bytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    inputs_in_progress_.insert({sender.get(), process});
  }
  network_->Send(process, key, &header, sizeof(header), data, static_cast<size_t>(bytes),
                 [this, process, sender = std::move(sender)](bool) {
                   {
                     std::lock_guard<std::mutex> lock(mutex_);
                     inputs_in_progress_.erase(inputs_in_progress_.find({sender.get(), process}));
                   }
                   sender->OnPutDone();
                 });
}

void ActiveMessages::Signal(int32_t process, uint64_t key, int32_t from, int32_t to) {
  Header header = HeaderOf(Kind::kSignal, key);
  header.from = from;
  header.to = to;
  Send(process, header, nullptr, 0);
}

void ActiveMessages::SendText(int32_t process, const Header& header, const std::string& text) {
  std::unique_ptr<char[]> data(new char[text.size()]);
  std::memcpy(data.get(), text.data(), text.size());
  Send(process, header, std::move(data), static_cast<int64_t>(text.size()));
}

void ActiveMessages::SendEntered(int32_t process, uint64_t key, const Fingerprint& fingerprint, const RunAndGroup& run,
                                 const std::string& what) {
  Header header = HeaderOf(Kind::kEntered, key, fingerprint);
  header.run = run;
  SendText(process, header, what);
}

void ActiveMessages::SendExited(int32_t process, uint64_t key, const Fingerprint& fingerprint,
                                const std::string& what) {
  SendText(process, HeaderOf(Kind::kExited, key, fingerprint), what);
}

void ActiveMessages::SendAborted(int32_t process, uint64_t key, const std::string& why) {
  SendText(process, HeaderOf(Kind::kAborted, key), why);
}

void ActiveMessages::SendRunFailed(int32_t process, int64_t run_id, const std::string& why) {
  Header header = HeaderOf(Kind::kRunFailed, 0);
  header.run.run_id = run_id;
  SendText(process, header, why);
}

void ActiveMessages::OnRunFailed(int32_t process, int64_t run_id, const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto same = [run_id](const FailedRun& run) { return run.run_id == run_id; };
  const auto found = std::find_if(failed_runs_.begin(), failed_runs_.end(), same);
  if (found != failed_runs_.end()) {
    found->why.emplace(process, why);
    return;
  }
  failed_runs_.push_back({run_id, {{process, why}}});
  if (failed_runs_.size() > kMaxFailedRuns) failed_runs_.pop_front();
}

std::optional<std::string> ActiveMessages::FailureOf(int32_t process, int64_t run_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const FailedRun& run : failed_runs_) {
    const auto found = run.why.find(process);
    if (run.run_id == run_id && found != run.why.end()) return found->second;
  }
  return std::nullopt;
}

Status ActiveMessages::Reachable(int32_t process) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = lost_.find(process);
  return found == lost_.end() ? OkStatus() : UnavailableError(found->second);
}

std::string ActiveMessages::OtherCallsOf(int32_t process) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const auto& [key, waiting] : waiting_) {
    const auto found = waiting.entered.find(process);
    if (found == waiting.entered.end()) continue;
    text += (text.empty() ? " in " : " and in ") + found->second.what;
    if (text.size() > 600) break;
  }
  return text;
}

std::optional<ActiveMessages::OtherCall> ActiveMessages::CallOfOtherRun(int32_t process, const RunAndGroup& own) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::optional<OtherCall> call;
  std::optional<int64_t> run_id;
  for (const auto& [key, waiting] : waiting_) {
    const auto found = waiting.entered.find(process);
    if (found == waiting.entered.end()) continue;
    const RunAndGroup& run = found->second.run;
    if (run.run_id == own.run_id || run.run_id != run_id.value_or(run.run_id)) return std::nullopt;
    run_id = run.run_id;
    if (run.group == own.group && (!call || key < call->key)) call = {key, run.run_id, found->second.what};
  }
  return call;
}

void* ActiveMessages::TextDestination(const Message& message) {
  auto& destination = texts_[{message.process, message.id}];
  destination.reset(new char[std::max<size_t>(message.bytes, 1)]);
  return destination.get();
}

// Drops the message, so that later ones of its channel are delivered. A large payload is not fetched.
void* ActiveMessages::Refuse(const Message& message) {
  network_->Accept(message.process, message.id, nullptr);
  return nullptr;
}

void* ActiveMessages::OnMessage(const Message& message) {
  Header header;
  if (message.header_bytes != sizeof(header)) return Refuse(message);
  std::memcpy(&header, message.header, sizeof(header));
  if (header.kind != Kind::kPut) return TextDestination(message);
  std::shared_ptr<MessageHandler> handler;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_.count(header.key) > 0) return Refuse(message);
    const auto found = handlers_.find(header.key);
    if (found == handlers_.end()) {
      Waiting& waiting = waiting_[header.key];
      if (waiting.aborted.count(message.process) > 0) return Refuse(message);
      waiting.puts.push_back({message.process, message.id, header, static_cast<int64_t>(message.bytes)});
      return nullptr;
    }
    handler = found->second;
  }
  void* const destination =
      AssignDestination(message.process, message.id, header, static_cast<int64_t>(message.bytes), handler);
  return destination != nullptr ? destination : Refuse(message);
}

void ActiveMessages::FinishPut(const MessageId& id) {
  std::shared_ptr<MessageHandler> handler;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = puts_in_progress_.find(id);
    if (found == puts_in_progress_.end()) return;
    handler = std::move(found->second);
    puts_in_progress_.erase(found);
  }
  handler->OnPutDone();
}

// `process` has aborted a call that this process has not entered. If this process enters it later, it gets the error.
void ActiveMessages::DropWaiting(uint64_t key, int32_t process) {
  std::vector<WaitingPut> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto drop = [&](Waiting& waiting, bool all) {
      const auto kept = std::partition(waiting.puts.begin(), waiting.puts.end(),
                                       [&](const WaitingPut& put) { return !all && put.process != process; });
      dropped.insert(dropped.end(), kept, waiting.puts.end());
      waiting.puts.erase(kept, waiting.puts.end());
    };
    const auto found = waiting_.find(key);
    if (found == waiting_.end()) return;
    drop(found->second, false);
    found->second.aborted.insert(process);
    aborted_.push_back(key);
    if (aborted_.size() > kMaxAborted) {
      const auto oldest = waiting_.find(aborted_.front());
      aborted_.pop_front();
      if (oldest != waiting_.end()) {
        drop(oldest->second, true);
        waiting_.erase(oldest);
      }
    }
  }
  for (const WaitingPut& put : dropped) network_->Accept(put.process, put.id, nullptr);
}

void ActiveMessages::Dispatch(uint64_t key, WaitingEvent event, const std::function<void(Waiting&)>& note) {
  std::shared_ptr<MessageHandler> handler;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_.count(key) > 0) return;
    const auto found = handlers_.find(key);
    if (found == handlers_.end()) {
      Waiting& waiting = waiting_[key];
      waiting.events.push_back(std::move(event));
      if (note) note(waiting);
      return;
    }
    handler = found->second;
  }
  event.event(*handler);
}

void ActiveMessages::OnDelivered(const Message& message) {
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
    case Kind::kPut:
      return FinishPut({message.process, message.id});
    case Kind::kSignal:
      return Dispatch(header.key,
                      {process, [=](MessageHandler& handler) { handler.OnSignal(header.from, header.to); }});
    case Kind::kEntered:
      return Dispatch(header.key,
                      {process, [=](MessageHandler& handler) { handler.OnEntered(process, header.fingerprint, text); }},
                      [&](Waiting& waiting) { waiting.entered[process] = {header.run, text}; });
    case Kind::kExited:
      return Dispatch(header.key,
                      {process, [=](MessageHandler& handler) { handler.OnExited(process, header.fingerprint, text); }});
    case Kind::kAborted:
      Dispatch(header.key, {process, [=](MessageHandler& handler) { handler.OnAborted(process, text); }},
               [&](Waiting& waiting) { waiting.entered.erase(process); });
      return DropWaiting(header.key, process);
    case Kind::kRunFailed:
      return OnRunFailed(process, header.run.run_id, text);
  }
}

void ActiveMessages::OnPeerLost(int process, const std::string& why) {
  std::vector<std::shared_ptr<MessageHandler>> handlers, interrupted;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    lost_[process] = why;
    for (const auto& entry : handlers_) handlers.push_back(entry.second);
    for (auto it = puts_in_progress_.lower_bound({process, 0});
         it != puts_in_progress_.end() && it->first.first == process;) {
      interrupted.push_back(std::move(it->second));
      it = puts_in_progress_.erase(it);
    }
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      Waiting& waiting = it->second;
      waiting.entered.erase(process);
      // These messages are not needed any more: a call that needs the lost process fails when it checks whether the
      // process is reachable.
      const auto of_lost = [&](const auto& item) { return item.process == process; };
      waiting.puts.erase(std::remove_if(waiting.puts.begin(), waiting.puts.end(), of_lost), waiting.puts.end());
      waiting.events.erase(std::remove_if(waiting.events.begin(), waiting.events.end(), of_lost), waiting.events.end());
      it = waiting.puts.empty() && waiting.events.empty() ? waiting_.erase(it) : std::next(it);
    }
  }
  for (const auto& handler : interrupted) handler->OnPutDone();
  for (const auto& handler : handlers) handler->OnLost(process);
}

}  // namespace jaxcomm
