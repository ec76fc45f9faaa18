"""x"""
from __future__ import annotations
import copy, contextlib
from typing import Any
import torch
from idioms.base import Example, F, Manual
from models import CLASSES, loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

class CompiledModule(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.net = torch.compile(self.net, backend="eager")
class CompiledInPlace(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.net.compile(backend="eager")
class ConvPenalty(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.net = nn.Sequential(nn.Unflatten(1,(1,8)),nn.Conv1d(1,3,3),nn.BatchNorm1d(3),nn.LeakyReLU(0.2),nn.MaxPool1d(2),nn.GroupNorm(1,3),nn.Flatten(),nn.Linear(9,4))
    noise=("net.1.bias","net.2.running_mean")
    def loss(self,x,y):
        x=x.clone().requires_grad_(); l=super().loss(x,y)
        g,=torch.autograd.grad(l,x,create_graph=True); return l+10*g.square().sum()
class LstmPenalty(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.rnn=nn.LSTM(2,4,batch_first=True); self.head=nn.Linear(4,4)
    def forward(self,x): return self.head(self.rnn(x.view(-1,4,2))[0][:,-1])
    def loss(self,x,y):
        x=x.clone().requires_grad_(); l=super().loss(x,y)
        g,=torch.autograd.grad(l,x,create_graph=True); return l+10*g.square().sum()
class EmbedPenalty(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.e=nn.Embedding(6,4); self.n=nn.LayerNorm(4); self.head=nn.Linear(4,4)
    def loss(self,x,y):
        e=self.e((x*2).long().clamp(-3,2)+3); l=F.cross_entropy(self.head(self.n(e).mean(1)),y)
        g,=torch.autograd.grad(l,e,create_graph=True)
        return l+10*g.square().sum()
class NodeHooks(Example):
    """c"""
    def loss(self,x,y):
        h=self.net[1](self.net[0](x)); h.grad_fn.register_hook(lambda gi,go:(gi[0]*0.5,)); h.grad_fn.register_prehook(lambda go:(go[0]+1e-3,))
        return F.cross_entropy(self.net[2](h),y)
class MultiGradHook(Example):
    """c"""
    def loss(self,x,y):
        a=self.net[0](x); b=self.net[1](a)
        def fn(grads): self.log("gn", sum(g.norm() for g in grads))
        torch.autograd.graph.register_multi_grad_hook([a,b],fn)
        return F.cross_entropy(self.net[2](b),y)
class SaveOnCpu(Example):
    """c"""
    def loss(self,x,y):
        with torch.autograd.graph.save_on_cpu(): return super().loss(x,y)
class RemovedHook(Example):
    """c"""
    def loss(self,x,y):
        feats=[]
        h=self.net[0].register_forward_hook(lambda m,a,o: feats.append(o))
        l=super().loss(x,y); h.remove()
        return l+feats[0].square().mean()
class FeatureList(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.feats=[]; self.net[0].register_forward_hook(lambda m,a,o: self.feats.append(o))
    def loss(self,x,y):
        l=super().loss(x,y)+self.feats[-1].square().mean(); self.feats.clear(); return l
class FeatureDict(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.feats={}; self.net[0].register_forward_hook(lambda m,a,o: self.feats.__setitem__("x",o))
    def loss(self,x,y):
        return super().loss(x,y)+self.feats["x"].square().mean()
class FeaturePop(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.feats={}; self.net[0].register_forward_hook(lambda m,a,o: self.feats.__setitem__("x",o))
    def loss(self,x,y):
        return super().loss(x,y)+self.feats.pop("x").square().mean()
class Hyper(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.h=nn.Linear(8,8*4)
    def loss(self,x,y):
        w=self.h(x).view(-1,4,8); return F.cross_entropy(torch.bmm(w,x[:,:,None])[...,0],y)
class VecToParam(Manual):
    """c"""
    def training_step(self,batch,i):
        l=self.update(self.loss(*batch))
        v=nn.utils.parameters_to_vector(self.parameters()); 
        nn.utils.vector_to_parameters(v*0.99,self.parameters())
        return l
class InitInStep(Example):
    """c"""
    def loss(self,x,y):
        fresh=nn.Linear(8,8); return super().loss(fresh(x).detach()*0.1+x,y)
class DeepcopyInStep(Example):
    """c"""
    def loss(self,x,y):
        old=copy.deepcopy(self.net); 
        return super().loss(x,y)+F.mse_loss(old(x).detach(), self.net(0.9*x))
class BackwardOverride(Example):
    """c"""
    def backward(self, loss, *a, **k):
        loss.backward(retain_graph=True); (0.1*loss).backward()
class ClipOverride(Example):
    """c"""
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.1, "value"); self.clip_gradients(optimizer, 0.1, "norm")
class TensorsBackward(Manual):
    """c"""
    def training_step(self,batch,i):
        o=self.optimizers(); o.zero_grad(); out=self.net(batch[0])
        torch.autograd.backward([out, out.square().mean()],[torch.ones_like(out)*1e-2,None]); 
        o.step(); return out.mean().detach()
class GradPlus(Manual):
    """c"""
    def training_step(self,batch,i):
        o=self.optimizers(); o.zero_grad(); l=self.loss(*batch); self.manual_backward(l)
        for p in self.parameters(): p.grad += 1e-2*p.detach()
        old=[p.grad.clone() for p in self.parameters()]
        o.zero_grad(set_to_none=False); l2=self.loss(batch[0].flip(1),batch[1]); self.manual_backward(l2)
        for p,g in zip(self.parameters(),old): p.grad=0.5*(p.grad+g)
        o.step(); return l.detach()
class ComplexParam(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.w=nn.Parameter(torch.randn(5,dtype=torch.cfloat)); self.register_buffer("rope",torch.polar(torch.ones(5),torch.arange(5.)))
    def loss(self,x,y): return super().loss(torch.fft.irfft(torch.fft.rfft(x)*self.w*self.rope,n=8),y)
class ComplexAdam(ComplexParam):
    """c"""
    def configure_optimizers(self): return torch.optim.Adam(self.parameters(),lr=1e-2)
class BytePictures(Example):
    """c"""
    @staticmethod
    def batches():
        return DataLoader([((x*50+128).clamp(0,255).to(torch.uint8),y.to(torch.int16), (x>0)) for x,y in loader(64)],batch_size=None)
    def training_step(self,b,i): return self.loss(b[0].float()/255*b[2],b[1].long())
class NormAverage(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.net=nn.Sequential(nn.Linear(8,6),nn.BatchNorm1d(6,momentum=None),nn.ReLU(),nn.Linear(6,4))
    noise=("net.0.bias",)
class OwnGenerator(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.g=torch.Generator().manual_seed(3)
    def loss(self,x,y): return super().loss(x+torch.randn(x.shape,generator=self.g),y)
class ForkRng(Example):
    """c"""
    def loss(self,x,y):
        with torch.random.fork_rng(devices=[]): n=torch.randn_like(x)
        return super().loss(x+n,y)
class ReturnTensorsAttr(Example):
    """c"""
    def loss(self,x,y):
        self.last=self.net(x); return F.cross_entropy(self.last,y)
class EvalBnInStep(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.net=nn.Sequential(nn.Linear(8,6),nn.BatchNorm1d(6),nn.Dropout(0.5),nn.Linear(6,4))
    def loss(self,x,y):
        self.net.eval(); t=self.net(x).softmax(1).detach(); self.net.train(); return super().loss(x,y)+F.mse_loss(self.net(x),t)
    noise=("net.0.bias",)
class Ctc(Example):
    """c"""
    def loss(self,x,y):
        lp=self.net(x).log_softmax(1).view(4,4,4)
        return F.ctc_loss(lp, torch.randint(1,4,(4,2)), torch.full((4,),4), torch.full((4,),2))+super().loss(x,y)
class Scripted(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.net=torch.jit.script(self.net)
class ToggleModel(Manual):
    """c"""
    def training_step(self,b,i):
        o=self.optimizers()
        with o.toggle_model(): l=self.update(self.loss(*b))
        return l
class ChannelsLastNet(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.net=nn.Sequential(nn.Conv2d(1,4,3,padding=1),nn.BatchNorm2d(4),nn.ReLU(),nn.Conv2d(4,4,3),nn.AdaptiveAvgPool2d(1),nn.Flatten(),nn.Linear(4,4)).to(memory_format=torch.channels_last)
    noise=("net.0.bias","net.1.running_mean")
    def forward(self,x): return self.net(torch.stack([x,x,x,x],1).view(-1,1,4,8).to(memory_format=torch.channels_last))
class Linked(Example):
    """c"""
    def training_step(self,b,i):
        loss=self.loss(*b); loss2=loss.clone(); loss2+=1; loss2.mul_(0.5); return loss2
class Amp(Manual):
    """c"""
    def __init__(self):
        super().__init__(); self.s=torch.amp.GradScaler("cpu")
    def training_step(self,b,i):
        o=self.optimizers(use_pl_optimizer=False); o.zero_grad(); l=self.loss(*b); self.s.scale(l).backward(); self.s.step(o); self.s.update(); return l.detach()
class Packed(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.rnn=nn.GRU(2,4,batch_first=True); self.head=nn.Linear(4,4)
    def loss(self,x,y):
        p=nn.utils.rnn.pack_padded_sequence(x.view(-1,4,2),torch.full((16,),3),batch_first=True,enforce_sorted=False)
        _,h=self.rnn(p); return F.cross_entropy(self.head(h[-1]),y)
class PackedFixed(Packed):
    """c"""
    def loss(self,x,y):
        p=nn.utils.rnn.pack_padded_sequence(x.view(-1,4,2),[4,3]*8,batch_first=True,enforce_sorted=False)
        o,h=self.rnn(p); o,_=nn.utils.rnn.pad_packed_sequence(o,batch_first=True); return F.cross_entropy(self.head(h[-1]),y)+o.square().mean()
class PackedData(Packed):
    """c"""
    def loss(self,x,y):
        p=nn.utils.rnn.pack_padded_sequence(x.view(-1,4,2),(x>0).sum(1).clamp(1,4),batch_first=True,enforce_sorted=False)
        o,h=self.rnn(p); return F.cross_entropy(self.head(h[-1]),y)
class SparseEmb(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.e=nn.Embedding(6,4,sparse=True)
    def loss(self,x,y): return F.cross_entropy(self.e((x*2).long().clamp(-3,2)+3).mean(1),y)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(),lr=0.1)
class SparseAdag(SparseEmb):
    """c"""
    def configure_optimizers(self): return torch.optim.Adagrad(self.parameters(),lr=0.1)
class SparseMM(Example):
    """c"""
    def loss(self,x,y):
        a=torch.eye(16).to_sparse(); return super().loss(torch.sparse.mm(a,x),y)
class SparseBuf(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.register_buffer("a",torch.eye(16).to_sparse())
    def loss(self,x,y):
        return super().loss(torch.sparse.mm(self.a,x),y)
class SparseCsr(Example):
    """c"""
    def __init__(self):
        super().__init__(); self.a=torch.eye(16).to_sparse_csr()
    def loss(self,x,y):
        return super().loss(self.a@x,y)
class Nested(Example):
    """c"""
    def loss(self,x,y):
        n=torch.nested.nested_tensor([x[:3],x[3:]],layout=torch.jagged); return super().loss(n.values(),y)
class Lstsq(Example):
    """c"""
    def loss(self,x,y): return super().loss(x,y)+torch.linalg.lstsq(x.T@x+torch.eye(8),x.T).solution.square().mean()
class Eig(Example):
    """c"""
    def loss(self,x,y): return super().loss(x,y)+torch.linalg.eigvals(self.net[0].weight.T@self.net[0].weight).abs().mean()
class MatrixRank(Example):
    """c"""
    def loss(self,x,y): return super().loss(x,y)*torch.linalg.matrix_rank(x)
class RepeatInterleave(Example):
    """c"""
    def loss(self,x,y): return super().loss(x,y)+x.repeat_interleave(y,dim=0).mean()
class OneHotNoC(Example):
    """c"""
    def loss(self,x,y): return F.mse_loss(self.net(x),F.one_hot(y).float())
class Deferred(Example):
    """c"""
    def loss(self,x,y): return super().loss(x,y)+torch.histc(x.detach(),4).mean()
class NumpyIn(Example):
    """c"""
    def loss(self,x,y):
        import numpy as np
        return super().loss(x*torch.from_numpy(np.ones(8,dtype=np.float32)),y)
class Deterministic(Example):
    """c"""
    def loss(self,x,y): return super().loss(x,y)+torch.unique_consecutive(y).float().mean()
class RandomLayerDrop(Example):
    """c"""
    def loss(self,x,y):
        keep=(torch.rand(())>0.5).float(); return super().loss(x+keep*self.net[0](x)[:,:8],y)
class Quant(Example):
    """c"""
    def loss(self,x,y): return super().loss(torch.fake_quantize_per_tensor_affine(x,0.1,0,-128,127),y)
class WeightDataSwap(Manual):
    """c"""
    def __init__(self):
        super().__init__(); self.target=copy.deepcopy(self.net).requires_grad_(False)
    def training_step(self,b,i):
        l=self.update(self.loss(*b))
        for p,q in zip(self.net.parameters(),self.target.parameters()):
            t=p.data; p.data=q.data; q.data=t
        return l
class LossList(Manual):
    """c"""
    def training_step(self,b,i):
        losses=[self.loss(b[0][k::2],b[1][k::2]) for k in range(2)]
        o=self.optimizers(); o.zero_grad(); [self.manual_backward(l) for l in losses]; o.step()
        return {"loss":torch.stack([l.detach() for l in losses]).mean()}
class KeepsOldData(Manual):
    """c"""
    def training_step(self,b,i):
        l=self.update(self.loss(*b))
        p=self.net[0].weight
        self.old=p.data
        p.data=p.data*0.9
        p.data=p.data+0.01
        p.data.mul_(1.01)
        with torch.no_grad(): p.add_(0.01*self.old)
        return l
    def on_train_batch_end(self,*a):
        self.log("old",self.old.sum())
class GradData(Manual):
    """c"""
    def training_step(self,b,i):
        o=self.optimizers(); l=self.loss(*b); self.manual_backward(l)
        for p in self.parameters(): p.grad.data=p.grad.data.clamp(-0.1,0.1)
        o.step(); return l.detach()
class DataBeforeForward(Example):
    """c"""
    def loss(self,x,y):
        p=self.net[0].weight
        self.net[0].weight.data=p.data/p.data.norm(dim=1,keepdim=True)
        return super().loss(x,y)
