package rtb

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"spillway.dev/spillway/test/await"
)

// post sends a bid request and returns the status and the bid, if there is one.
func post(t *testing.T, url string, body []byte) (status int, bid Bid) {
	t.Helper()
	resp, err := http.Post(url, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		if err := json.NewDecoder(resp.Body).Decode(&bid); err != nil {
			t.Fatal(err)
		}
	}
	return resp.StatusCode, bid
}

func TestSampleIsAbout3KB(t *testing.T) {
	if n := len(Sample()); n < 2900 || n > 3300 {
		t.Errorf("%d bytes", n)
	}
	if _, err := Decode(Sample()); err != nil {
		t.Error(err)
	}
}

func TestExchange(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	e := NewExchange()
	exchange := httptest.NewServer(e.Handler())
	defer exchange.Close()
	if status, _ := post(t, exchange.URL+"/bid", Sample()); status != http.StatusNotFound {
		t.Errorf("without bidders: %d, want 404", status)
	}
	if status, _ := post(t, exchange.URL+"/bid", []byte("{}")); status != http.StatusBadRequest {
		t.Errorf("no impression: %d, want 400", status)
	}
	add := func(h http.Handler) {
		s := httptest.NewServer(h)
		t.Cleanup(s.Close)
		before := len(e.bidders())
		go Register(ctx, exchange.URL+"/register", s.URL+"/bid", func(err error) { t.Error(err) })
		await.True(t, "a bidder registers", func() bool { return len(e.bidders()) > before })
	}
	add(DSP{Price: 0.01}.Handler()) // below the floor
	if status, _ := post(t, exchange.URL+"/bid", Sample()); status != http.StatusNoContent {
		t.Errorf("nobody bids: %d, want 204", status)
	}
	add(DSP{Price: 0.4}.Handler())
	add(DSP{Price: 0.7}.Handler())
	if status, bid := post(t, exchange.URL+"/bid", Sample()); status != http.StatusOK || bid.Price != 0.7 || bid.ImpID != "1" {
		t.Errorf("%d, %+v; want the highest bid", status, bid)
	}
	slow := make(chan struct{})
	defer close(slow)
	add(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-slow }))
	if status, bid := post(t, exchange.URL+"/bid", Sample()); status != http.StatusOK || bid.Price != 0.7 {
		t.Errorf("with a bidder that never answers: %d, %+v", status, bid)
	}
}

func TestRegisterRefusesWhatIsNoURL(t *testing.T) {
	exchange := httptest.NewServer(NewExchange().Handler())
	defer exchange.Close()
	for _, body := range []string{"", "10.0.0.1:80", "ftp://10.0.0.1/"} {
		if status, _ := post(t, exchange.URL+"/register", []byte(body)); status != http.StatusBadRequest {
			t.Errorf("%q: %d, want 400", body, status)
		}
	}
}
