// A producer and a consumer for TurtleMQ in Go: 1.19 or newer, the standard library alone. docs/OTHER-LANGUAGES.md explains the rules.
//
//	go run worker.go produce orders 3        three messages, due in one second
//	go run worker.go consume orders          until SIGTERM or Ctrl-C; TTR=30 and WORK=0 are seconds of a lease and of the work
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"
)

type message struct {
	ID   string `json:"id"`
	Body struct {
		Number int `json:"number"`
		Fails  int `json:"fails"`
	} `json:"body"`
	Attempt int `json:"attempt"`
}

type batch struct {
	Messages []message `json:"messages"`
	Lease    string    `json:"lease"`
}

type settled struct {
	Unknown []string `json:"unknown"`
	Late    []string `json:"late"`
}

type fields map[string]any

func argument(at int, otherwise string) string {
	if len(os.Args) > at {
		return os.Args[at]
	}
	return otherwise
}

func seconds(name, otherwise string) float64 {
	text := os.Getenv(name)
	if text == "" {
		text = otherwise
	}
	value, err := strconv.ParseFloat(text, 64)
	if err != nil {
		log.Fatal(name, " is a number of seconds")
	}
	return value
}

func lasting(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }

// call makes one request. A lost connection, 429 and 503 are tried again with growing pauses; any other refusal is an error of this program.
func call(ctx context.Context, path string, body fields, answer any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		status, text, err := ask(ctx, path, data)
		switch {
		case err == nil && status < 300:
			return json.Unmarshal(text, answer)
		case err == nil && status != 429 && status != 502 && status != 503 && status != 504:
			return errors.New(string(text))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause/2 + time.Duration(rand.Int63n(int64(pause/2)))):
		}
	}
}

func ask(ctx context.Context, path string, data []byte) (int, []byte, error) {
	url := os.Getenv("TURTLEMQ_URL")
	if url == "" {
		url = "http://127.0.0.1:8878"
	}
	request, err := http.NewRequestWithContext(ctx, "POST", url+"/v1/topics/"+argument(2, "orders")+"/"+path, bytes.NewReader(data))
	if err != nil {
		return 0, nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	if token := os.Getenv("TURTLEMQ_TOKEN"); token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return answer.StatusCode, text, err
}

func min(a, b time.Duration) time.Duration {
	if a < b {
		return a
	}
	return b
}

// produce gives messages ids of its own, which make a retry safe: an id is stored once.
func produce() error {
	count, err := strconv.Atoi(argument(3, "1"))
	if err != nil {
		return err
	}
	var messages []fields
	for i := 0; i < count; i++ {
		messages = append(messages, fields{"id": fmt.Sprint("order-", i), "body": fields{"number": i}, "delay": 1})
	}
	var stored struct{ Created, Duplicates int }
	if err := call(context.Background(), "messages", fields{"messages": messages}, &stored); err != nil {
		return err
	}
	fmt.Printf("%d created, %d duplicates\n", stored.Created, stored.Duplicates)
	return nil
}

func handle(m message, work time.Duration) error {
	time.Sleep(work) // your work
	if m.Attempt <= m.Body.Fails {
		return errors.New("not yet")
	}
	return nil
}

func consume(ttr float64, work time.Duration) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	for ctx.Err() == nil {
		var got batch
		err := call(ctx, "fetch", fields{"max": 10, "wait": 20, "ttr": ttr}, &got) // a stop ends the long poll
		if err == nil {
			err = handleAll(got, ttr, work) // a stop lets the messages in hand finish
		}
		if err != nil && ctx.Err() == nil {
			return err
		}
	}
	fmt.Println("stopped")
	return nil
}

// holding is the set of messages in hand that are not settled.
type holding struct {
	sync.Mutex
	ids map[string]bool
}

func (h *holding) list() (out []string) {
	h.Lock()
	defer h.Unlock()
	for id := range h.ids {
		out = append(out, id)
	}
	return out
}

func (h *holding) remove(ids ...string) {
	h.Lock()
	defer h.Unlock()
	for _, id := range ids {
		delete(h.ids, id)
	}
}

// handleAll handles a batch while another goroutine extends the leases of what is not settled, three times in each lease.
func handleAll(got batch, ttr float64, work time.Duration) error {
	if len(got.Messages) == 0 {
		return nil
	}
	held := &holding{ids: map[string]bool{}}
	for _, m := range got.Messages {
		held.ids[m.ID] = true
	}
	ctx, done := context.WithCancel(context.Background())
	defer done()
	go extend(ctx, held, got.Lease, ttr)
	for _, m := range got.Messages {
		word, ack := "handled", fields{"acks": []string{m.ID}, "lease": got.Lease}
		if problem := handle(m, work); problem != nil {
			word, ack = "failed", fields{"acks": []string{"-" + m.ID}, "lease": got.Lease, "error": problem.Error()}
		}
		var answer settled
		if err := call(ctx, "ack", ack, &answer); err != nil {
			return err
		}
		held.remove(m.ID)
		late := map[bool]string{true: " too late"}[len(answer.Late) > 0]
		fmt.Printf("%s %s attempt %d%s\n", word, m.ID, m.Attempt, late)
	}
	return nil
}

func extend(ctx context.Context, held *holding, lease string, ttr float64) {
	ticker := time.NewTicker(lasting(ttr / 3))
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		var answer settled
		if ids := held.list(); len(ids) > 0 && call(ctx, "extend", fields{"ids": ids, "ttr": ttr, "lease": lease}, &answer) == nil {
			held.remove(append(answer.Unknown, answer.Late...)...) // lost: another consumer may have them
		}
	}
}

func main() {
	run := produce
	if argument(1, "") == "consume" {
		run = func() error { return consume(seconds("TTR", "30"), lasting(seconds("WORK", "0"))) }
	}
	if err := run(); err != nil {
		log.Fatal(err)
	}
}
