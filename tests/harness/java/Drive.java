import com.example.delay.DelayGrpcClient;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.CountDownLatch;

/** Drives the client of the Hyper Delay Server: PORT ROUTE TASKS DELAY_MS ack|hold. Ends when its standard input is closed. */
public final class Drive {
  private Drive() {}

  public static void main(String[] args) throws Exception {
    int port = Integer.parseInt(args[0]);
    int tasks = Integer.parseInt(args[2]);
    long delayMs = Long.parseLong(args[3]);
    boolean holds = args[4].equals("hold");
    DelayGrpcClient client =
        new DelayGrpcClient(
            "127.0.0.1",
            port,
            args[1],
            delivery -> {
              boolean early = System.currentTimeMillis() < delivery.getFireAtEpochMs();
              System.out.println((early ? "early " : "task ") + delivery.getPayload().toStringUtf8());
              if (holds) {
                try {
                  new CountDownLatch(1).await();
                } catch (InterruptedException error) {
                  Thread.currentThread().interrupt();
                }
              }
            });
    long due = System.currentTimeMillis() + delayMs;
    for (int i = 0; i < tasks; i++) {
      client.scheduleAt(due, ("task-" + i).getBytes(StandardCharsets.UTF_8));
    }
    while (System.in.read() >= 0) {
      continue;
    }
    client.close();
  }
}
