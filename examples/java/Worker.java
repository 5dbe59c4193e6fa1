// A producer and a consumer for TurtleMQ in Java: 17 or newer, with Gson for JSON. docs/OTHER-LANGUAGES.md explains the rules.
//
//   java -cp gson.jar Worker.java produce orders 3        three messages, due in one second
//   java -cp gson.jar Worker.java consume orders          until SIGTERM or Ctrl-C; TTR=30 and WORK=0 are seconds of a lease and of the work

import com.google.gson.Gson;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;

public class Worker {
    static class Order { int number; int fails; }
    static class Message { String id; Order body; int attempt; }
    static class Batch { List<Message> messages; String lease; }
    static class Stored { int created; int duplicates; }
    static class Settled { List<String> unknown = List.of(); List<String> late = List.of(); }
    static class Stopped extends Exception { static final long serialVersionUID = 1; }

    static final Set<Integer> TRIED_AGAIN = Set.of(429, 502, 503, 504);
    static final double TTR = Double.parseDouble(System.getenv().getOrDefault("TTR", "30"));
    static final double WORK = Double.parseDouble(System.getenv().getOrDefault("WORK", "0"));
    static final String TOKEN = System.getenv("TURTLEMQ_TOKEN");

    final Gson gson = new Gson();
    final HttpClient http = HttpClient.newHttpClient();
    final String base;
    volatile boolean stopping;
    volatile CompletableFuture<HttpResponse<String>> longPoll;

    Worker(String topic) {
        base = System.getenv().getOrDefault("TURTLEMQ_URL", "http://127.0.0.1:8878") + "/v1/topics/" + topic + "/";
    }

    // One request. A lost connection, 429 and 503 are tried again with growing pauses; any other refusal is an error of this program.
    <T> T call(String path, Object body, Class<T> type, boolean endsWithStop) throws Exception {
        HttpRequest.Builder request = HttpRequest.newBuilder(URI.create(base + path)).header("Content-Type", "application/json");
        if (TOKEN != null) request.header("Authorization", "Bearer " + TOKEN);
        request.POST(HttpRequest.BodyPublishers.ofString(gson.toJson(body)));
        for (long pause = 100; ; pause = Math.min(2 * pause, 5_000)) {
            try {
                CompletableFuture<HttpResponse<String>> asked = http.sendAsync(request.build(), HttpResponse.BodyHandlers.ofString());
                if (endsWithStop) longPoll = asked;
                if (endsWithStop && stopping) throw new Stopped();
                HttpResponse<String> answer = asked.get();
                if (answer.statusCode() < 300) return gson.fromJson(answer.body(), type);
                if (!TRIED_AGAIN.contains(answer.statusCode())) throw new IOException(answer.body());
            } catch (ExecutionException | CancellationException lost) {
                if (endsWithStop && stopping) throw new Stopped();
            }
            Thread.sleep((long) (pause * (0.5 + Math.random() / 2)));
        }
    }

    // Ids of the producer's own make a retry safe: an id is stored once.
    void produce(int count) throws Exception {
        List<Object> messages = new ArrayList<>();
        for (int i = 0; i < count; i++) messages.add(Map.of("id", "order-" + i, "body", Map.of("number", i), "delay", 1));
        Stored stored = call("messages", Map.of("messages", messages), Stored.class, false);
        System.out.println(stored.created + " created, " + stored.duplicates + " duplicates");
    }

    void handle(Message message) throws Exception {
        Thread.sleep((long) (WORK * 1000)); // your work
        if (message.attempt <= message.body.fails) throw new Exception("not yet");
    }

    void consume() throws Exception {
        Thread main = Thread.currentThread();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> { // of SIGTERM and Ctrl-C
            stopping = true;
            if (longPoll != null) longPoll.cancel(true); // a stop ends the long poll, and lets the messages in hand finish
            try { main.join(); } catch (InterruptedException ignored) { }
        }));
        try {
            while (!stopping) handleAll(call("fetch", Map.of("max", 10, "wait", 20, "ttr", TTR), Batch.class, true));
        } catch (Stopped stopped) {
        }
        System.out.println("stopped");
    }

    // Handles a batch while another thread extends the leases of what is not settled, three times in each lease.
    void handleAll(Batch batch) throws Exception {
        if (batch.messages.isEmpty()) return;
        Set<String> held = ConcurrentHashMap.newKeySet();
        for (Message message : batch.messages) held.add(message.id);
        long pause = (long) (TTR * 1000 / 3);
        var timer = Executors.newSingleThreadScheduledExecutor();
        timer.scheduleAtFixedRate(() -> extend(held, batch.lease), pause, pause, TimeUnit.MILLISECONDS);
        try {
            for (Message message : batch.messages) settle(message, held, batch.lease);
        } finally {
            timer.shutdownNow();
        }
    }

    void settle(Message message, Set<String> held, String lease) throws Exception {
        Map<String, Object> ack = new HashMap<>(Map.of("acks", List.of(message.id), "lease", lease));
        try {
            handle(message);
        } catch (Exception problem) {
            ack.putAll(Map.of("acks", List.of("-" + message.id), "error", problem.getMessage()));
        }
        Settled answer = call("ack", ack, Settled.class, false);
        held.remove(message.id);
        String word = ack.containsKey("error") ? "failed " : "handled ";
        System.out.println(word + message.id + " attempt " + message.attempt + (answer.late.isEmpty() ? "" : " too late"));
    }

    void extend(Set<String> held, String lease) {
        try {
            if (held.isEmpty()) return;
            Settled answer = call("extend", Map.of("ids", held, "ttr", TTR, "lease", lease), Settled.class, false);
            held.removeAll(answer.unknown); // lost: another consumer may have them
            held.removeAll(answer.late);
        } catch (InterruptedException done) { // the batch is settled
        } catch (Exception problem) {
            System.err.println(problem);
        }
    }

    public static void main(String[] args) throws Exception {
        Worker worker = new Worker(args.length > 1 ? args[1] : "orders");
        if (args[0].equals("produce")) worker.produce(args.length > 2 ? Integer.parseInt(args[2]) : 1);
        else worker.consume();
    }
}
