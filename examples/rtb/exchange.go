package rtb

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"
)

// forgetAfter is how long a bidder counts that does not register again.
const forgetAfter = 10 * time.Second

// Exchange answers bid requests: 404 when no bidder is registered, 204 when none
// bids in time, and the highest bid otherwise.
type Exchange struct {
	client *http.Client

	mu   sync.RWMutex
	dsps map[string]time.Time // URL: last registration
}

// NewExchange returns an exchange without bidders.
func NewExchange() *Exchange {
	return &Exchange{
		dsps: map[string]time.Time{},
		// Connections stay open: with a new one for each bid the handshake
		// would be what is measured.
		client: &http.Client{Transport: &http.Transport{
			MaxIdleConnsPerHost: 512,
			DialContext:         (&net.Dialer{Timeout: time.Second}).DialContext,
		}},
	}
}

// Handler returns the exchange's pages.
func (e *Exchange) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /register", e.register)
	mux.HandleFunc("POST /bid", e.bid)
	mux.HandleFunc("GET /healthz", func(http.ResponseWriter, *http.Request) {})
	return mux
}

// register takes a bidder's URL.
func (e *Exchange) register(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	u, err := url.Parse(string(body))
	if err != nil || u.Scheme != "http" || u.Host == "" {
		http.Error(w, fmt.Sprintf("register %q: not an http URL", body), http.StatusBadRequest)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dsps[u.String()] = time.Now()
	w.WriteHeader(http.StatusNoContent)
}

// bidders returns the URLs of those who registered lately.
func (e *Exchange) bidders() []string {
	e.mu.RLock()
	defer e.mu.RUnlock()
	var out []string
	for u, last := range e.dsps {
		if time.Since(last) < forgetAfter {
			out = append(out, u)
		}
	}
	return out
}

func (e *Exchange) bid(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil {
		_, err = Decode(body)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	dsps := e.bidders()
	if len(dsps) == 0 {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	best := e.auction(r.Context(), dsps, body)
	if best == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	answer, err := json.Marshal(best)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(answer) // a publisher that is gone is not the exchange's trouble
}

// auction asks all bidders at once and returns the highest bid that came in
// time, nil if none did.
func (e *Exchange) auction(ctx context.Context, dsps []string, body []byte) *Bid {
	ctx, cancel := context.WithTimeout(ctx, Budget)
	defer cancel()
	bids := make(chan *Bid, len(dsps))
	for _, u := range dsps {
		go func() { bids <- e.ask(ctx, u, body) }()
	}
	var best *Bid
	for range dsps {
		if b := <-bids; b != nil && (best == nil || b.Price > best.Price) {
			best = b
		}
	}
	return best
}

// ask returns a bidder's bid, nil if it has none.
func (e *Exchange) ask(ctx context.Context, dsp string, body []byte) *Bid {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, dsp, bytes.NewReader(body))
	if err != nil {
		return nil
	}
	resp, err := e.client.Do(req)
	if err != nil {
		return nil
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxBody)) // to its end, so that the connection is used again
	if err != nil || resp.StatusCode != http.StatusOK {
		return nil
	}
	var b Bid
	if json.Unmarshal(answer, &b) != nil {
		return nil
	}
	return &b
}
