import numpy as np
import torch
from backends.cpu.device import CpuReferenceDevice
from bridge.codecs import CODECS
from bridge.devices import *
from bridge.shares import chunk_share
from bridge.wire import *
import pytest

@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("first,end",[(0,100),(5,37),(16,17)])
def test_rt(name, first, end):
    g=torch.Generator().manual_seed(1)
    D,H,L=64,3,2
    def cache(B,P,fill):
        t=[torch.randn(P,B,H,D,generator=g).to(torch.bfloat16) if fill else torch.full((P,B,H,D),float('nan'),dtype=torch.bfloat16) for _ in range(2*L)]
        return PagedCache({i:LayerPages.nhd(t[2*i],t[2*i+1]) for i in range(L)})
    src=cache(8,20,True); dst=cache(32,6,False)
    codec=CODECS[name].for_layer(D,Element.BF16)
    m=Manifest(bytes(32),((ContentKind.TOKENS,token_digest([1])),),"r",1,1,48,(Group(H,D,first,end),),(codec,),tuple(Layer(i,0,0) for i in range(L)))
    pm=PayloadMap(m); keys=TagKeys(new_key(),1,1)
    dev=CpuReferenceDevice()
    ts=BlockTable(list(np.random.default_rng(0).permutation(20)),8); td=BlockTable(list(np.random.default_rng(1).permutation(6)),32)
    for c in range(pm.chunk_count):
        ch=chunk_share(m,pm.chunk(c),src)
        buf=np.full(ch.nbytes,0xcd,np.uint8)
        dev.pack(src,ts,ch.shares,keys,buf)
        dev.land(dst,td,ch.shares,keys,buf,first,end)
    ps,os=ts.locate(first,end,20); pd,od=td.locate(first,end,6)
    for i in range(L):
        a=src.layers[i].key[ps,os].float(); b=dst.layers[i].key[pd,od].float()
        e=((a-b)**2).sum()/(a**2).sum(); print(name,e.item())
        assert e<0.05
        assert torch.isnan(dst.layers[i].key).sum()== (6*32-(end-first))*H*D
        if name=="raw": assert e==0
