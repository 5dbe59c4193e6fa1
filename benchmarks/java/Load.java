import com.example.delay.proto.AckRequest;
import com.example.delay.proto.ClientMessage;
import com.example.delay.proto.DelaySchedulerGrpc;
import com.example.delay.proto.RegisterRequest;
import com.example.delay.proto.ScheduleRequest;
import com.example.delay.proto.ServerMessage;
import com.google.protobuf.ByteString;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.stub.StreamObserver;
import java.util.Scanner;
import java.util.concurrent.CountDownLatch;

/**
 * An ordinary gRPC client under load: PORT. Each line of its standard input, "put TOPIC COUNT BYTES" or "take TOPIC COUNT 0", is
 * one stream with so many messages; the answer is a line with its nanoseconds.
 */
public final class Load {
  private Load() {}

  public static void main(String[] args) throws Exception {
    ManagedChannel channel = ManagedChannelBuilder.forAddress("127.0.0.1", Integer.parseInt(args[0])).usePlaintext().build();
    Scanner commands = new Scanner(System.in);
    while (commands.hasNext()) {
      boolean puts = commands.next().equals("put");
      String topic = commands.next();
      int count = commands.nextInt();
      int bytes = commands.nextInt();
      long begin = System.nanoTime();
      Stream stream = new Stream(channel, count);
      if (puts) {
        stream.put(topic, count, bytes);
      } else {
        stream.take(topic);
      }
      stream.done.await();
      System.out.println(System.nanoTime() - begin);
      stream.sent.onCompleted();
      stream.closed.await();
    }
    channel.shutdownNow();
  }

  /** One stream: it counts acks of what it has scheduled, and acknowledges what it is given. */
  private static final class Stream implements StreamObserver<ServerMessage> {
    final CountDownLatch done = new CountDownLatch(1);
    final CountDownLatch closed = new CountDownLatch(1);
    final StreamObserver<ClientMessage> sent;
    private int left;

    Stream(ManagedChannel channel, int count) {
      left = count;
      sent = DelaySchedulerGrpc.newStub(channel).connect(this);
    }

    void put(String topic, int count, int bytes) {
      ByteString payload = ByteString.copyFrom(new byte[bytes]);
      long due = System.currentTimeMillis() + 3_600_000;
      for (int i = 0; i < count; i++) {
        ScheduleRequest request = ScheduleRequest.newBuilder().setFireAtEpochMs(due).setPayload(payload).setRouteKey(topic).build();
        sent.onNext(ClientMessage.newBuilder().setSchedule(request).build());
      }
    }

    void take(String topic) {
      sent.onNext(ClientMessage.newBuilder().setRegister(RegisterRequest.newBuilder().setRouteKey(topic)).build());
    }

    @Override
    public void onNext(ServerMessage message) {
      if (message.hasError()) {
        throw new IllegalStateException(message.getError().getMessage());
      }
      if (message.hasDelivery()) {
        AckRequest ack = AckRequest.newBuilder().setId(message.getDelivery().getId()).build();
        sent.onNext(ClientMessage.newBuilder().setAck(ack).build());
      } else if (!message.hasAck()) {
        return;
      }
      left--;
      if (left == 0) {
        done.countDown();
      }
    }

    @Override
    public void onError(Throwable error) {
      error.printStackTrace();
      System.exit(1);
    }

    @Override
    public void onCompleted() {
      closed.countDown();
    }
  }
}
