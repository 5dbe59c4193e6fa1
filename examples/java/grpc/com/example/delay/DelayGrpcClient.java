package com.example.delay;

import com.example.delay.proto.AckRequest;
import com.example.delay.proto.ClientMessage;
import com.example.delay.proto.Compression;
import com.example.delay.proto.DelaySchedulerGrpc;
import com.example.delay.proto.Delivery;
import com.example.delay.proto.RegisterRequest;
import com.example.delay.proto.ScheduleRequest;
import com.example.delay.proto.ServerMessage;
import com.google.protobuf.ByteString;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.stub.StreamObserver;

import java.io.Closeable;
import java.util.UUID;
import java.util.function.Consumer;

public class DelayGrpcClient implements Closeable {
  private final ManagedChannel channel;
  private final DelaySchedulerGrpc.DelaySchedulerStub stub;
  private final StreamObserver<ClientMessage> requestObserver;
  private final String routeKey;
  private final Consumer<Delivery> handler;

  public DelayGrpcClient(
      String host,
      int port,
      String routeKey,
      Consumer<Delivery> handler) {
    this.channel = ManagedChannelBuilder.forAddress(host, port).usePlaintext().build();
    this.stub = DelaySchedulerGrpc.newStub(channel);
    this.routeKey = routeKey;
    this.handler = handler;

    this.requestObserver = stub.connect(new StreamObserver<ServerMessage>() {
      @Override
      public void onNext(ServerMessage serverMessage) {
        if (serverMessage.hasDelivery()) {
          Delivery delivery = serverMessage.getDelivery();
          handler.accept(delivery);
          requestObserver.onNext(ClientMessage.newBuilder()
              .setAck(AckRequest.newBuilder().setId(delivery.getId()).build())
              .build());
        }
      }

      @Override
      public void onError(Throwable t) {
        // 可加入重连逻辑
      }

      @Override
      public void onCompleted() {
        // 服务端主动关闭
      }
    });

    requestObserver.onNext(ClientMessage.newBuilder()
        .setRegister(RegisterRequest.newBuilder().setRouteKey(routeKey).build())
        .build());
  }

  public void scheduleAt(long fireAtEpochMs, byte[] payload) {
    ScheduleRequest request = ScheduleRequest.newBuilder()
        .setId(UUID.randomUUID().toString())
        .setRouteKey(routeKey)
        .setFireAtEpochMs(fireAtEpochMs)
        .setPayload(ByteString.copyFrom(payload))
        .setCompression(Compression.COMPRESSION_NONE)
        .build();
    requestObserver.onNext(ClientMessage.newBuilder().setSchedule(request).build());
  }

  @Override
  public void close() {
    requestObserver.onCompleted();
    channel.shutdownNow();
  }
}
