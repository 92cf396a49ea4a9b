package rtb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// registerEvery is how often a bidder says that it is there.
const registerEvery = 2 * time.Second

// DSP is a bidder: it bids the same for every impression.
type DSP struct {
	Price float64 // for a thousand; less than an impression's floor is no bid
}

// Handler returns the bidder's pages.
func (d DSP) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /bid", d.bid)
	mux.HandleFunc("GET /healthz", func(http.ResponseWriter, *http.Request) {})
	return mux
}

func (d DSP) bid(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var req *Request
	if err == nil {
		req, err = Decode(body)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	imp := req.Imp[0]
	if d.Price < imp.BidFloor {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	answer, err := json.Marshal(Bid{ID: req.ID, ImpID: imp.ID, Price: d.Price, AdM: "<img src=\"https://ads.example.test/1.png\">"})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(answer)
}

// Register tells an exchange a bidder's URL, again and again until ctx ends.
// failed is told of each time that it did not work.
func Register(ctx context.Context, exchange, self string, failed func(error)) {
	client := &http.Client{Timeout: time.Second}
	for {
		wait := registerEvery
		if err := register(ctx, client, exchange, self); err != nil && ctx.Err() == nil {
			failed(err)
			wait = registerEvery / 10
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

func register(ctx context.Context, client *http.Client, exchange, self string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, exchange, strings.NewReader(self))
	if err != nil {
		return fmt.Errorf("register at %s: %w", exchange, err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("register: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		return fmt.Errorf("register at %s: %s", exchange, resp.Status)
	}
	return nil
}

// Serve serves a handler on an address until ctx ends, which is no error.
func Serve(ctx context.Context, addr string, h http.Handler) error {
	s := &http.Server{Addr: addr, Handler: h, ReadHeaderTimeout: 5 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	if err := s.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
